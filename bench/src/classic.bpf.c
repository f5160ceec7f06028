// The programs that the agent is compared with: a sock_ops program in C that sets the initial RTO of one network, like
// the kernel's samples (the idea is from samples/bpf/tcp_synrto_kern.c).
//
// With -DEMPTY it does nothing. With -DSAME_WORK it does the same work as the agent for a policy with only an initial
// RTO: longest prefix, policy, counters per policy, callbacks for losses.

#include <linux/bpf.h>
#include <linux/types.h>

#define SEC(name) __attribute__((section(name), used))
// 100 ms at 250 Hz.
#define INITIAL_RTO_JIFFIES 25

#ifdef EMPTY

SEC("sockops") int empty(struct bpf_sock_ops *ctx)
{
	return 1;
}

#elif !defined(SAME_WORK)

// 127.0.0.0/8, in network order.
#define NETWORK __builtin_bswap32(0x7f000000)
#define MASK __builtin_bswap32(0xff000000)

SEC("sockops") int classic(struct bpf_sock_ops *ctx)
{
	switch (ctx->op) {
	case BPF_SOCK_OPS_TIMEOUT_INIT:
		if (ctx->family == 2 && (ctx->remote_ip4 & MASK) == NETWORK)
			ctx->reply = INITIAL_RTO_JIFFIES;
		break;
	}
	return 1;
}

#else

#define NUMBER(name, n) int(*name)[n]
#define TYPE(name, t) typeof(t) *name
#define MAPS SEC(".maps")

static void *(*map_lookup)(void *map, const void *key) = (void *)BPF_FUNC_map_lookup_elem;
static long (*map_update)(void *map, const void *key, const void *value, __u64 flags) = (void *)BPF_FUNC_map_update_elem;
static long (*cb_flags_set)(void *ctx, int flags) = (void *)BPF_FUNC_sock_ops_cb_flags_set;

struct key {
	__u32 prefix;
	__u32 address;
};

struct policy {
	__u32 initial_rto_jiffies;
};

struct counters {
	__u64 initial_rtos_set;
	__u64 connections;
};

// The only entry and the only policy are created when a socket starts to listen.
struct {
	NUMBER(type, BPF_MAP_TYPE_LPM_TRIE);
	NUMBER(max_entries, 16384);
	NUMBER(map_flags, BPF_F_NO_PREALLOC);
	TYPE(key, struct key);
	TYPE(value, __u32);
} entries MAPS;

struct {
	NUMBER(type, BPF_MAP_TYPE_ARRAY);
	NUMBER(max_entries, 1024);
	TYPE(key, __u32);
	TYPE(value, struct policy);
} policies MAPS;

struct {
	NUMBER(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	NUMBER(max_entries, 1024);
	TYPE(key, __u32);
	TYPE(value, struct counters);
} statistics MAPS;

static struct policy *policy_of(struct bpf_sock_ops *ctx, __u32 *index)
{
	if (ctx->family != 2)
		return 0;
	struct key key = { 32, ctx->remote_ip4 };
	__u32 *entry = map_lookup(&entries, &key);
	if (!entry)
		return 0;
	*index = *entry;
	return map_lookup(&policies, index);
}

#define COUNT(index, field, n)                                       \
	do {                                                         \
		__u32 of = index;                                    \
		struct counters *c = map_lookup(&statistics, &of);   \
		if (c)                                               \
			__sync_fetch_and_add(&c->field, n);          \
	} while (0)

SEC("sockops") int classic(struct bpf_sock_ops *ctx)
{
	struct policy *policy;
	__u32 index = 0;

	switch (ctx->op) {
	case BPF_SOCK_OPS_TIMEOUT_INIT:
		policy = policy_of(ctx, &index);
		if (policy) {
			ctx->reply = policy->initial_rto_jiffies;
			COUNT(index, initial_rtos_set, 1);
			if (ctx->is_fullsock)
				cb_flags_set(ctx, BPF_SOCK_OPS_RTO_CB_FLAG | BPF_SOCK_OPS_RETRANS_CB_FLAG);
		}
		break;
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
		policy = policy_of(ctx, &index);
		if (policy)
			COUNT(index, connections, 1);
		break;
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		policy = policy_of(ctx, &index);
		if (policy) {
			COUNT(index, connections, 1);
			cb_flags_set(ctx, BPF_SOCK_OPS_RETRANS_CB_FLAG);
		}
		break;
	case BPF_SOCK_OPS_TCP_LISTEN_CB: {
		// Before the first connection.
		struct key key = { 8, __builtin_bswap32(0x7f000000) };
		struct policy near = { INITIAL_RTO_JIFFIES };
		map_update(&entries, &key, &index, 0);
		map_update(&policies, &index, &near, 0);
		break;
	}
	}
	return 1;
}

#endif

SEC("license") char licence[] = "Dual MIT/GPL";
