# make demo    see it work: an S3 server, a dataset, a mount, two epochs; leaves nothing behind
# make test    the whole test suite            (ARGS="-k words" picks some)
# make check   ruff and mypy --strict
# make bench   side by side with its peers
# make venv    only what all of them need: system packages by apt if missing, Python ones into .venv
# make lock    choose newer versions of the Python packages
# make clean   remove .venv and what the tools left
#
# PYTHON=python3.12 and VENV=/elsewhere choose others. Needs Python >= 3.11 and, for demo, test and bench, /dev/fuse.

VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.PHONY: demo test check bench venv lock clean device

demo: device venv
	@exec $(BIN)/s3prefetchfs demo $(ARGS)

test: device venv $(VENV)/.test-packages
	@exec $(BIN)/python -m pytest $(ARGS)

check: venv
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: device venv
	@exec $(BIN)/python -m bench $(ARGS)

venv: $(VENV)/.python-packages

device:
	@if ! { : <>/dev/fuse; } 2>/dev/null; then
	    echo "make: needs /dev/fuse, which is missing or closed to this user" \
	        "(modprobe fuse; for a container: --device /dev/fuse --cap-add SYS_ADMIN)" >&2
	    exit 1
	fi

# --- What it takes ---------------------------------------------------------------------------------------------

IS_FIT = import ensurepip, sys, sysconfig as c, os.path as p, venv; \
    sys.exit(sys.version_info < (3, 11) or not p.exists(p.join(c.get_path("include"), "Python.h")))

# Shell functions for the recipes below.
define FUNCTIONS
stop() { echo "make: $$*" >&2; exit 1; }

# Print the first Python that is new enough, can make a virtual environment and can build extensions.
fit_python() {
    local python
    for python in $(or $(PYTHON),python3.13 python3.12 python3.11 python3); do
        if "$$python" -c '$(IS_FIT)' 2>/dev/null; then echo "$$python"; return; fi
    done
    return 1
}

# Install the named Debian packages, as root or through sudo.
apt_install() {
    [ $$# -gt 0 ] || return 0
    command -v apt-get >/dev/null || stop "needs what Debian calls $$*: install it with this system's package manager"
    local sudo=
    if [ "$$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || stop "needs root or sudo for: apt-get install $$*"
        sudo=sudo
    fi
    echo "make: installing $$*"
    $$sudo apt-get update -qq || stop "needs the packages $$*, and apt-get update fails"
    $$sudo env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$$@" >/dev/null \
        || stop "needs the packages $$*, and apt-get install fails"
}
endef

$(VENV)/.system-packages: Makefile
	@$(FUNCTIONS)
	missing=()
	command -v fusermount3 >/dev/null || missing+=(fuse3)
	command -v cc >/dev/null || missing+=(gcc libc6-dev)
	command -v pkg-config >/dev/null || missing+=(pkg-config)
	pkg-config --exists fuse3 2>/dev/null || missing+=(libfuse3-dev)
	if ! fit_python >/dev/null; then
	    version=$$(python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || version=none
	    if [ -n "$(PYTHON)" ]; then
	        stop "needs Python >= 3.11 with its headers and venv; PYTHON=$(PYTHON) is not one"
	    elif [ "$$version" != none ] && python3 -c 'import sys; sys.exit(sys.version_info >= (3, 11))'; then
	        stop "needs Python >= 3.11; python3 is $$version: install a newer one, then make PYTHON=..."
	    fi
	    missing+=(python3 python3-dev python3-venv)
	fi
	apt_install "$${missing[@]}"
	fit_python >/dev/null || stop "needs Python >= 3.11 with its headers and venv, and finds none; make PYTHON=..."
	mkdir -p $(VENV)
	touch $@

$(VENV)/.test-packages: | $(VENV)/.system-packages
	@$(FUNCTIONS)
	command -v systemd-analyze >/dev/null || apt_install systemd
	touch $@

# pyfuse3 comes as source, and so does our C library: what builds them is locked and installed first.
$(VENV)/.python-packages: requirements.lock requirements-build.lock pyproject.toml s3prefetchfs/fuse/_open_reply.c \
        | $(VENV)/.system-packages
	@$(FUNCTIONS)
	[ -x $(BIN)/python ] || "$$(fit_python)" -m venv $(VENV)
	echo "make: installing Python packages into $(VENV) (minutes the first time)"
	pip() { $(BIN)/python -m pip --disable-pip-version-check install --quiet "$$@" || stop "pip install failed (see above)"; }
	pip --require-hashes -r requirements-build.lock
	pip --require-hashes --no-build-isolation -r requirements.lock
	pip --no-build-isolation --no-deps --editable .
	touch $@

lock:
	@compile="$(BIN)/python -m uv pip compile --upgrade --universal --generate-hashes --python-version 3.11"
	compile+=" --no-emit-index-url --no-emit-find-links --no-header --quiet"
	$(BIN)/python -m pip install --quiet uv
	$$compile --extra demo --extra plot --group test --group lint pyproject.toml --output-file requirements.lock
	printf '%s\n' 'setuptools>=78.1.1' 'setuptools_scm>=8' Cython \
	    | $$compile --constraint requirements.lock - --output-file requirements-build.lock

clean:
	@rm -rf $(VENV) build *.egg-info s3prefetchfs/fuse/*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
