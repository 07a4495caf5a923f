# make demo: a fresh machine -> a real job of 1,000 pages.   make test: everything that CI checks.
PYTHON ?= python3
BIN := .venv/bin
# Most tests wait for processes and sockets more than they compute: two for each core.
WORKERS ?= $(shell echo $$((2 * $$(nproc))))

.PHONY: demo test check format docs screenshots screens mutants clean test-deploy

demo: .venv/.installed
	$(BIN)/conveyor demo

test: check .venv-servers/.installed .venv-localstack/.installed .venv/axe.min.js
	@for package in redis-server postgresql=/usr/lib/postgresql strace chromium iproute2=ip; do program=$${package##*=} package=$${package%%=*}; \
		command -v $$program >/dev/null || [ -d $$program ] \
		|| { apt-get update && RUNLEVEL=1 apt-get install -y --no-install-recommends $$package; } \
		|| echo "$$package cannot be installed here: its tests are skipped"; done
	$(BIN)/pytest -n $(WORKERS) --dist worksteal
	$(BIN)/conveyor simulate --seeds 200

check: .venv/.installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q tests/tidy

format: .venv/.installed-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Writes the parts of the documents that repeat the code; tests/tidy compares them.
docs: .venv/.installed-test
	$(BIN)/python -m tests.tidy.generate

# Visits every page of the dashboard in Chromium, light, dark and narrow.
screenshots: .venv/.installed-test .venv/axe.min.js
	$(BIN)/python -m tests.ui.screenshots

# Runs `conveyor scrape` in terminals of three widths and writes what they show into docs/scrape.md, and
# the session of an agent with `conveyor mcp` into docs/mcp.md.
screens: .venv/.installed-test
	$(BIN)/python -m tests.cli.screens
	$(BIN)/python -m tests.cli.mcp_session

# When the simulator or the program has changed, other seeds kill the mutants.
mutants: .venv/.installed-test
	$(BIN)/python -m tests.mutants --record tests/mutants/kills.json

# The image, both templates on a local AWS, containers, backups and linters: beside `make test`, because
# it builds an image and needs podman. BASE may name another base image, for machines without a registry.
test-deploy: .venv/.installed-test .venv-servers/.installed .venv-deploy/.installed .venv-checkov/.installed
	@for program in buildah podman runc promtool caddy; do command -v $$program >/dev/null || missing=$$program; done; \
		[ -x /usr/lib/podman/netavark ] || missing=netavark; \
		[ -z "$$missing" ] || { apt-get update && RUNLEVEL=1 apt-get install -y --no-install-recommends \
		buildah podman runc uidmap containernetworking-plugins netavark aardvark-dns catatonit prometheus caddy; }
	tests/deploy/build_image.sh
	CONVEYOR_TEST_IMAGE=localhost/conveyor:test $(BIN)/pytest tests/deploy

# checkov pins another boto3 than the AWS CLI.
.venv-checkov/.installed: tests/deploy/checkov.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@

.venv-deploy/.installed: tests/deploy/tools.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@

.venv/.installed: pyproject.toml constraints.txt | .venv/bin/pip
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/.installed-test: pyproject.toml constraints.txt | .venv/bin/pip
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[aws,postgres,test]'
	touch .venv/.installed $@

# The accessibility checker that the browser tests run.
.venv/axe.min.js: | .venv/bin/pip
	npm pack --silent axe-core@4.14.0 --pack-destination .venv \
		&& tar -xzf .venv/axe-core-4.14.0.tgz -C .venv --strip-components=1 package/axe.min.js \
		|| echo "axe-core cannot be fetched here: accessibility is not checked"

# Emulators of AWS pin what we pin otherwise, so they live in environments of their own.
.venv-servers/.installed: tests/servers.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps -r $<
	touch $@

.venv-localstack/.installed: tests/localstack.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps -r $<
	touch $@

.venv/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Conveyor needs Python 3.11 or later: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv \
		|| { apt-get update && apt-get install -y python3-venv && $(PYTHON) -m venv .venv; }

clean:
	rm -rf .venv .venv-servers .venv-localstack .venv-deploy .venv-checkov build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis demo-results
