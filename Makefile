# You need Python 3.10 to 3.12 with pip (for all but `test`, 3.13 will do). Everything else is installed into .venv, once.
#
#   make demo                      train, kill a rank, compare with an unbroken run (under 3 minutes after installation)
#   RANK=0 STEP=30 SEED=7 make demo    kill rank 0 during step 30; SEED gives the moment in the step
#   make demo ARGS="--example gpt" the same with a small GPT, sharded and replicated
#   make test                      run all tests except the slow campaigns. ARGS="-k store -x" is passed to pytest;
#                                  JOBS=2 runs two tests at a time (default 5, because jobs often wait for each other).
#                                  A failed test is tried once more, and the summary counts it: on a busy machine real
#                                  processes can be late
#   make lint types protos docs    run the checks of CI, through nox; the documentation is built as a site, into site/
#   make test-gpu PYTHON=python3   run the tests that need a GPU, with a Python that has torch with CUDA. Installs
#                                  nothing, says what is missing, takes 20 minutes at most; ARGS="-k host_ahead" runs a
#                                  part. See docs/gpu.md
#   make frameworks                test Trainer, Accelerate and loaders of torchdata, in an environment of their own.
#                                  See docs/frameworks.md
#   make bench                     run the benchmarks, and print a table
#   make clean                     remove .venv and everything in it
#
# TORCH is given to pip. On Linux PyPI's build of torch brings CUDA (several GB); for the small CPU build:
#   make demo TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
TORCH ?= torch==2.13.0
MINDSPORE ?= mindspore==2.10.0 'numpy>=1.26.4,<2'
VENV ?= .venv
ARGS ?=
JOBS ?= 5

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check

# A test run starts a thousand processes: none should have to compile the package for itself.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-gpu bench lint types protos docs frameworks clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

demo: $(VENV)/.installed-demo
	@$(PY) examples/demo.py $(ARGS)

# pytest-xdist hangs at the end of a run in which it has replaced a worker that died.
test: $(VENV)/.installed-test
	$(PY) -m pytest -n $(JOBS) --max-worker-restart 0 --dist loadgroup --reruns 1 --durations 15 $(ARGS)

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

# Some systems ship Python without ensurepip; then the system's pip installs pip into the environment.
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

# MindSpore is by far the largest package that the tests need.
$(VENV)/.installed-frameworks: $(VENV)/.installed-torch
	@$(PY) -c 'import sys; sys.exit("the tests need MindSpore, which has no package for Python " + \
	    sys.version.split()[0] + ": make clean, then make test PYTHON=python3.12" if sys.version_info >= (3, 13) else 0)'
	$(PIP) install $(MINDSPORE)
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed-frameworks pyproject.toml
	$(PIP) install -e '.[torch,test,examples,types]'
	@touch $@

$(VENV)/.installed-nox: $(VENV)/.made
	$(PIP) install 'nox>=2024.4'
	@touch $@
