# Sourced by the commands in infra/, with the project's root as the current folder: makes .venv or finds it
# complete. Needs a POSIX shell and Python 3.11 or 3.12. Second runs cost one start of the interpreter.
#
#   HEADRACE_PYTHON   the interpreter to use; else python3.12, python3.11, python3 or python, the first that fits

# Some environments forbid bytecode; every process of a stack would compile all it imports again.
unset PYTHONDONTWRITEBYTECODE

headrace_say() { printf 'headrace: %s\n' "$*" >&2; }
headrace_fail() { headrace_say "$*"; exit 1; }

# True for an interpreter that runs and is 3.11 or 3.12. Run, because a version manager's shim may stand
# on PATH for a version that is not active.
headrace_fits() {
    "$1" -I -S -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1
}

headrace_find_python() {
    if [ -n "${HEADRACE_PYTHON:-}" ]; then
        headrace_fits "$HEADRACE_PYTHON" ||
            headrace_fail "HEADRACE_PYTHON=$HEADRACE_PYTHON does not run or is not Python 3.11 or 3.12"
        headrace_can_make_venv "$HEADRACE_PYTHON" ||
            headrace_fail "HEADRACE_PYTHON=$HEADRACE_PYTHON lacks venv or pip: install them (Debian: python3-venv)"
        headrace_python=$HEADRACE_PYTHON
        return
    fi
    headrace_lacking=
    for headrace_name in python3.12 python3.11 python3 python; do
        # Every place on PATH, not the first alone: a broken shim may hide a good one.
        for headrace_candidate in $(headrace_all_on_path "$headrace_name"); do
            headrace_fits "$headrace_candidate" || continue
            if headrace_can_make_venv "$headrace_candidate"; then
                headrace_python=$headrace_candidate
                return
            fi
            headrace_lacking=$headrace_candidate
        done
    done
    [ -z "$headrace_lacking" ] ||
        headrace_fail "$headrace_lacking lacks venv or pip: install them (Debian: apt-get install python3-venv)"
    headrace_fail "found no Python 3.11 or 3.12 on PATH: install one, or set HEADRACE_PYTHON to its path"
}

headrace_all_on_path() (
    IFS=:
    for folder in $PATH; do
        if [ -x "$folder/$1" ] && [ ! -d "$folder/$1" ]; then printf '%s\n' "$folder/$1"; fi
    done
)

headrace_can_make_venv() { "$1" -I -c 'import ensurepip, venv' >/dev/null 2>&1; }

# What .venv was made from. The path is part of it: scripts and the editable install hold it.
headrace_state() {
    {
        cat infra/requirements.lock infra/requirements-uv.lock pyproject.toml
        pwd
        "$1" -I -S -c 'import sys; print(sys.version)'
    } | sha256sum
}

headrace_make_environment() {
    mkdir -p .headrace || headrace_fail "cannot write to $(pwd)"
    if command -v flock >/dev/null 2>&1; then
        flock -n 9 || {
            headrace_say "waiting for another command that makes the environment"
            flock -w 1800 9 || headrace_fail "another command has been making .venv for 30 minutes; stop it"
        }
        if headrace_is_complete; then return; fi
    fi
    # The marker is left by an interrupted run: packages may be half there, so begin anew (downloads are cached).
    if [ -e .venv/unfinished ] || ! headrace_fits .venv/bin/python || ! headrace_is_wanted_python; then
        headrace_find_python
        headrace_check_disk
        rm -rf .venv
        headrace_say "making .venv with $("$headrace_python" --version)"
        mkdir .venv && : >.venv/unfinished && "$headrace_python" -m venv .venv ||
            headrace_fail "could not make .venv with $headrace_python (no space left? try: df -h .)"
    fi
    : >.venv/unfinished || headrace_fail "cannot write to .venv (no space left? try: df -h .)"

    if ! .venv/bin/python -m uv --version 2>/dev/null | grep -q "^uv $(headrace_locked_uv) "; then
        headrace_say "installing uv, the package installer"
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes \
            --requirement infra/requirements-uv.lock ||
            headrace_fail "installing uv failed (see above); check the network and run the command again"
    fi
    headrace_say "installing the pinned packages (the first time about 3 GB to download, some minutes)"
    # Installed, not synchronized: packages of the model and of the Java runtime are added on demand.
    headrace_uv --require-hashes --requirement infra/requirements.lock ||
        headrace_fail "installing packages failed (see above); run the command again: what is complete is kept"
    rm .venv/unfinished
    headrace_uv --quiet --no-deps --no-build-isolation --editable . ||
        headrace_fail "installing the project itself failed (see above)"

    headrace_state .venv/bin/python >.venv/state.partial && mv .venv/state.partial .venv/state ||
        headrace_fail "cannot write to .venv (no space left? try: df -h .)"
    headrace_say "environment ready"
}

headrace_uv() {
    # uv does not read pip's settings.
    if [ -n "${PIP_INDEX_URL:-}" ] && [ -z "${UV_DEFAULT_INDEX:-}" ]; then
        export UV_DEFAULT_INDEX="$PIP_INDEX_URL"
    fi
    UV_PYTHON_DOWNLOADS=never UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-180}" \
        .venv/bin/python -m uv pip install --python .venv/bin/python "$@"
}

headrace_locked_uv() { sed -n 's/^uv==\([0-9.]*\).*/\1/p' infra/requirements-uv.lock; }

headrace_is_wanted_python() {
    [ -z "${HEADRACE_PYTHON:-}" ] ||
        [ "$(.venv/bin/python -I -S -c 'import sys; print(sys.version)')" = \
            "$("$HEADRACE_PYTHON" -I -S -c 'import sys; print(sys.version)')" ]
}

headrace_is_complete() {
    [ -e .venv/state ] && [ ! -e .venv/unfinished ] && headrace_is_wanted_python &&
        [ "$(headrace_state .venv/bin/python 2>/dev/null)" = "$(cat .venv/state)" ]
}

headrace_check_disk() {
    headrace_needed_kb=$((7 * 1024 * 1024))
    headrace_free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
    [ "${headrace_free_kb:-$headrace_needed_kb}" -ge "$headrace_needed_kb" ] ||
        headrace_fail "the environment takes about 7 GB and $(pwd) has $((headrace_free_kb / 1024)) MB free"
}

if ! headrace_is_complete; then
    # A subshell, so that the lock is not handed on to what runs afterwards.
    mkdir -p .headrace && (headrace_make_environment) 9>.headrace/environment.lock || exit 1
fi
