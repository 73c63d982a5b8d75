# Sourced by ops/check and ops/test after setup_python: the static checks, all of them at once, and every
# complaint of all of them.

static_checks() {
    local logs bin="$root/.venv/bin" name failed=""
    local -A pids=()
    logs=$(mktemp -d)
    "$bin/ruff" check . >"$logs/ruff check" 2>&1 & pids["ruff check"]=$!
    "$bin/ruff" format --check . >"$logs/ruff format --check" 2>&1 & pids["ruff format --check"]=$!
    "$bin/lint-imports" --no-logo >"$logs/lint-imports" 2>&1 & pids["lint-imports"]=$!
    "$bin/basedpyright" --pythonpath "$bin/python" >"$logs/basedpyright" 2>&1 & pids["basedpyright"]=$!
    for name in "ruff check" "ruff format --check" "lint-imports" "basedpyright"; do
        if wait "${pids[$name]}"; then
            printf '%-20s ok\n' "$name"
        else
            printf '%-20s FAILED\n' "$name"
            cat "$logs/$name"
            failed=yes
        fi
    done
    rm -rf "$logs"
    [ -z "$failed" ] || die "static checks failed (see above)"
}
