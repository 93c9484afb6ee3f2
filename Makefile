# One verb for each thing a person does here. Each makes the environment it needs (minutes the first
# time, seconds afterwards). Variables:
#   PYTHON=python3.12            interpreter of a new environment (3.10 to 3.13)
#   FLASHRT_ROS_DISTRO=kilted    other wheels; a sourced ROS installation is used instead of wheels
#   PYTEST_ARGS='-k save'        passed on to pytest
PYTHON ?= python3
FLASHRT_ROS_DISTRO ?= jazzy
VENV ?= $(if $(filter jazzy,$(FLASHRT_ROS_DISTRO)),.venv,.venv-$(FLASHRT_ROS_DISTRO))
ENV_PYTHON ?= $(PYTHON)
TORCH ?= cpu
PURPOSE ?= test
PYTEST_ARGS ?=
DEMO_ARGS ?=
STUDY_ARGS ?=
BENCH_ARGS ?=
MATRIX_PYTHON ?= 3.11 3.12
MATRIX_DISTRO ?= jazzy kilted

SETUP = $(PYTHON) scripts/setup_venv.py --venv $(VENV) --python $(ENV_PYTHON)
# Nothing that this Makefile starts is discovered by other machines.
ROS = ROS_AUTOMATIC_DISCOVERY_RANGE=LOCALHOST
export FLASHRT_ROS_DISTRO

.DEFAULT_GOAL := help
.PHONY: help demo study test test-all test-long test-launch lint bench build-colcon clean

help: ## show these lines
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: ## serve, save, disturb, rewind: the whole story in a minute
	@$(SETUP) demo
	$(ROS) $(VENV)/bin/python -m flashrt_ros.demo $(DEMO_ARGS)

study: ## does a capsule help? 50 seeds of the demo, interrupted in seven ways; minutes
	@$(SETUP) demo
	$(VENV)/bin/python -m flashrt_ros.demo.study $(STUDY_ARGS)

test: ## the tests that hold the promises, under eight minutes on two cores
	@$(SETUP) $(PURPOSE) --torch $(TORCH)
	$(ROS) $(VENV)/bin/python -m pytest $(PYTEST_ARGS)

test-long: ## the long runs, kill counts and many seeds
	@$(SETUP) test --torch any
	$(ROS) $(VENV)/bin/python -m pytest -m long $(PYTEST_ARGS)

test-all: lint ## the matrix of Pythons and distributions, long runs, colcon, figures; half an hour
	set -e; for d in $(MATRIX_DISTRO); do for p in $(MATRIX_PYTHON); do \
	  echo "== Python $$p, ROS $$d"; \
	  $(MAKE) --no-print-directory test FLASHRT_ROS_DISTRO=$$d VENV=.venv-$$d-$$p \
	    ENV_PYTHON=python$$p TORCH=any PURPOSE=test-all; done; done
	$(MAKE) --no-print-directory test-long
	$(MAKE) --no-print-directory build-colcon
	$(MAKE) --no-print-directory bench

test-launch: ## the launch file, where launch and launch_ros are installed
	@$(SETUP) test
	$(ROS) $(VENV)/bin/python -m pytest -m launch -rs $(PYTEST_ARGS)

lint: ## ruff, and mypy in strict mode
	@$(SETUP) lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

bench: ## the figures of docs/benchmarks.md
	@$(SETUP) test --torch cpu
	$(ROS) $(VENV)/bin/python -m bench $(BENCH_ARGS)

build-colcon: ## colcon build of this root against the wheels
	$(PYTHON) scripts/build_colcon.py

clean: ## remove what was built, not the environments
	rm -rf build install log dist *.egg-info
