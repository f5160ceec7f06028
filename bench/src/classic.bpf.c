// What the agent is compared with: a sock_ops program in C that sets the initial RTO of one network, as those do
// that come with the kernel (samples/bpf/tcp_synrto_kern.c has the idea).
//
// With -DEMPTY it does nothing. With -DSAME_WORK it does what the agent does for a policy with an initial RTO alone: longest prefix, policy,
// the connection's policy kept with the socket, counters of each policy.

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
static void *(*sk_storage_get)(void *map, void *sk, void *value, __u64 flags) = (void *)BPF_FUNC_sk_storage_get;
static __u64 (*ktime_get_ns)(void) = (void *)BPF_FUNC_ktime_get_ns;

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
	__u64 handshake_ns;
};

struct connection {
	__u64 begin_ns;
	__u32 policy;
	__u32 initial_rto_jiffies;
};

// The one entry and the one policy are made when somebody listens.
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

struct {
	NUMBER(type, BPF_MAP_TYPE_SK_STORAGE);
	NUMBER(map_flags, BPF_F_NO_PREALLOC);
	TYPE(key, int);
	TYPE(value, struct connection);
} connections MAPS;

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

static struct connection *connection_of(struct bpf_sock_ops *ctx, __u64 flags)
{
	struct bpf_sock *sk = ctx->sk;
	return sk ? sk_storage_get(&connections, sk, 0, flags) : 0;
}

static void begin(struct bpf_sock_ops *ctx, _Bool is_active)
{
	__u32 index = 0;
	struct policy *policy = policy_of(ctx, &index);
	if (!policy)
		return;
	struct connection *connection = connection_of(ctx, BPF_SK_STORAGE_GET_F_CREATE);
	if (!connection)
		return;
	connection->begin_ns = ktime_get_ns();
	connection->policy = index;
	connection->initial_rto_jiffies = policy->initial_rto_jiffies;
	if (!is_active)
		COUNT(index, connections, 1);
}

SEC("sockops") int classic(struct bpf_sock_ops *ctx)
{
	struct connection *connection;
	struct policy *policy;
	__u32 index = 0;

	switch (ctx->op) {
	case BPF_SOCK_OPS_TCP_CONNECT_CB:
		begin(ctx, 1);
		break;
	case BPF_SOCK_OPS_TIMEOUT_INIT:
		connection = connection_of(ctx, 0);
		if (connection) {
			ctx->reply = connection->initial_rto_jiffies;
			COUNT(connection->policy, initial_rtos_set, 1);
			break;
		}
		policy = policy_of(ctx, &index);
		if (policy) {
			ctx->reply = policy->initial_rto_jiffies;
			COUNT(index, initial_rtos_set, 1);
		}
		break;
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
		connection = connection_of(ctx, 0);
		if (connection) {
			COUNT(connection->policy, handshake_ns, ktime_get_ns() - connection->begin_ns);
			COUNT(connection->policy, connections, 1);
		}
		break;
	case BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB:
		begin(ctx, 0);
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
