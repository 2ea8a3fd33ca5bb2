# All that is needed is Python 3.10-3.12 with pip. Everything is installed into .venv, once.
#
#   make demo                      train, kill a rank, compare with an unbroken run (under 3 minutes after installation)
#   RANK=0 STEP=30 SEED=7 make demo    kill this rank, in this step, at this moment of it
#   make demo ARGS="--example gpt" the same with a small GPT, sharded and replicated
#   make test                      all tests but the slow campaigns; ARGS="-k store -x" is passed to pytest,
#                                  JOBS=2 runs so many at a time (3: two cores idle while jobs wait for each other). A test that fails is tried
#                                  once more, and the summary counts it: real processes on a busy machine can be late
#   make lint types protos docs    what CI checks, through nox; the documentation is built as a site, into site/
#   make test-gpu PYTHON=python3   what only a GPU can show, with the Python that has torch with CUDA: installs nothing, says what
#                                  is missing, 20 minutes at most; ARGS="-k host_ahead" for a part of it. See docs/gpu.md
#   make frameworks                Trainer, Accelerate and loaders of torchdata, in an environment of their own; see docs/frameworks.md
#   make bench                     benchmarks, a table at the end
#   make clean                     remove .venv and what was installed into it
#
# torch: what pip's index gives for TORCH. On Linux PyPI's build brings CUDA (several GB); for the small CPU build:
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
TORCH ?= torch==2.13.0
MINDSPORE ?= mindspore==2.10.0 'numpy>=1.26.4,<2'
VENV ?= .venv
ARGS ?=
JOBS ?= 3

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check

.PHONY: help demo test test-gpu bench lint types protos docs frameworks clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.installed-demo
	@$(PY) examples/demo.py $(ARGS)

test: $(VENV)/.installed-test
	$(PY) -m pytest -n $(JOBS) --dist loadgroup --reruns 1 --durations 15 $(ARGS)

test-gpu:
	@PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m tests.gpu.needs
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" timeout --kill-after=30 1200 \
	    $(PYTHON) -m pytest tests/gpu -m gpu -W default -p no:cacheprovider --durations 10 $(ARGS)

bench: $(VENV)/.installed-test
	$(PY) -m benchmarks $(ARGS)

types: $(VENV)/.installed-test

lint types protos docs frameworks: $(VENV)/.installed-nox
	$(PY) -m nox -s $@

clean:
	rm -rf $(VENV) build *.egg-info

# Some systems ship Python without ensurepip; their own pip then puts a pip into the environment.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit("ttp needs Python 3.10 or later, this is " + sys.version.split()[0] + \
	    ": make PYTHON=python3.12 ..." if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	    $(PYTHON) -m pip --python $(PY) install pip; }
	@touch $@

$(VENV)/.installed-torch: $(VENV)/.made
	$(PIP) install $(TORCH)
	@touch $@

$(VENV)/.installed-demo: $(VENV)/.installed-torch pyproject.toml
	$(PIP) install -e '.[torch,examples]'
	@touch $@

# By far the largest of what the tests need.
$(VENV)/.installed-frameworks: $(VENV)/.installed-torch
	$(PIP) install $(MINDSPORE)
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed-frameworks pyproject.toml
	$(PIP) install -e '.[torch,test,examples,types]'
	@touch $@

$(VENV)/.installed-nox: $(VENV)/.made
	$(PIP) install 'nox>=2024.4'
	@touch $@
