# Installs the toolchain of rust-toolchain.toml, then runs cargo xtask. What that runs is built together with it: one
# build keeps all processors busy where two, one after the other, would not.

TOOLCHAIN := $(shell sed -n 's/^channel = "\(.*\)"/\1/p' rust-toolchain.toml)

.PHONY: demo test ebpf ebpf-check toolchain

# An end-to-end demo in temporary namespaces: connect() through outages without and with the agent.
demo: toolchain
	cargo build --locked --bin xtask --bin rto-agent --bin rto-bench --bin rto-workload
	cargo xtask demo

# With COVERAGE=1 on programs that count the lines they run, which are printed at the end.
test: toolchain
	$(if $(COVERAGE),,cargo build --workspace --locked --bins --tests)
	cargo xtask $(if $(COVERAGE),coverage,test)

# Rebuild the eBPF object kept in the tree; needed only after a change to agent-ebpf or agent-common.
ebpf: toolchain
	cargo xtask ebpf

ebpf-check: toolchain
	cargo xtask ebpf --check

# Also where rustup does not install toolchains itself (RUSTUP_AUTO_INSTALL=0).
toolchain:
	@rustup run $(TOOLCHAIN) rustc --version >/dev/null 2>&1 && \
	  rustup component list --installed --toolchain $(TOOLCHAIN) | grep -q clippy || { \
	  echo "installing Rust $(TOOLCHAIN)"; \
	  rustup toolchain install $(TOOLCHAIN) --profile minimal --component clippy,rustfmt,rust-src; }
