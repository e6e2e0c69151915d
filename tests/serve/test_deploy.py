"""The examples of deploy/ and the commands of docs/deploy.md: options exist, schemas hold, and what
they start answers."""

import http.client
import json
import os
import re
import shlex
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import contextmanager
from fnmatch import fnmatch

import kubernetes_validate
import pytest
import yaml
from job_services import operated
from paths import DOCS, ROOT
from serving import save_run, serving
from typer.testing import CliRunner

from shardckpt.cli.app import app
from shardckpt.serve.access.tokens import add_token
from shardckpt.serve.jobs.journal import Journal

DEPLOY = ROOT / "deploy"
BACKUP, RESTORE = re.findall(
    r"^```sh\n(.*?)^```", (DOCS / "deploy.md").read_text(), re.MULTILINE | re.DOTALL
)


def manifests():
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def starts():
    """The arguments of the service in each example."""
    by_line = {
        name: next(
            line
            for line in (DEPLOY / name).read_text().splitlines()
            if line.startswith(("ENTRYPOINT", "ExecStart"))
        )
        for name in ("Dockerfile", "shardckpt-serve.service")
    }
    deployment = next(one for one in manifests() if one["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["shardckpt"]
    proxied = re.search(r"shardckpt serve .*", (DEPLOY / "nginx.conf").read_text())[0]
    return by_line | {
        "kubernetes.yaml": " ".join(container["args"]),
        "compose.yaml": " ".join(compose["command"]),
        "nginx.conf": proxied,
    }


@pytest.mark.parametrize("name", [*starts()])
def test_it_starts_the_service_with_options_that_it_has(name):
    known = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).stdout
    options = set(re.findall(r"--[a-z-]+", starts()[name]))
    assert options
    assert all(f"{option} " in known for option in options)


def test_every_example_is_named_in_the_docs():
    page = (DOCS / "deploy.md").read_text()
    assert all(f"`{one.name}`" in page for one in DEPLOY.iterdir() if one.suffix != ".dockerignore")


def test_the_kubernetes_manifest_fits_its_schema():
    kinds = [one["kind"] for one in manifests()]
    assert kinds == ["PersistentVolumeClaim", "Deployment", "Service"]
    for one in manifests():
        for version in ("1.28.0", kubernetes_validate.latest_version()):
            kubernetes_validate.validate(one, version, strict=True)
    broken = manifests()[1]
    broken["spec"]["replica"] = broken["spec"].pop("replicas")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.28.0", strict=True)


def test_one_pod_owns_the_state_and_its_ports_and_volumes_fit():
    claim, deployment, service = manifests()
    spec, pod = deployment["spec"], deployment["spec"]["template"]["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    (container,) = pod["containers"]
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert {one["name"] for one in container["volumeMounts"]} == volumes.keys()
    assert volumes["state"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert (
        service["spec"]["selector"]
        == spec["selector"]["matchLabels"]
        == spec["template"]["metadata"]["labels"]
    )
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    assert f"EXPOSE {container['ports'][0]['containerPort']}" in dockerfile
    assert f"--uid {pod['securityContext']['runAsUser']} " in dockerfile
    mounts = {one["mountPath"] for one in container["volumeMounts"]}
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    mounted = [one.split(":")[1] for one in compose["services"]["shardckpt"]["volumes"]]
    for path in re.findall(r'"(/(?:etc|var)/[^"]*)"', dockerfile):
        assert any(path.startswith(one) for one in mounts)
        assert any(path.startswith(one) for one in mounted)
    assert (ROOT / compose["services"]["shardckpt"]["build"]["dockerfile"]).exists()


def test_every_metric_of_the_alerts_is_one_of_the_service(tmp_path):
    save_run(tmp_path / "runs" / "a", (1,))
    rules = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"][0]["rules"]
    used = {name for rule in rules for name in re.findall(r"shardckpt_serve_\w+", rule["expr"])}
    with operated(tmp_path, ("lab", tmp_path / "runs"), scrub=1e6) as lab:
        known = set(
            re.findall(r"^(shardckpt_serve_\w+)", lab.ask("/metrics").body.decode(), re.MULTILINE)
        )
    assert used
    assert used <= known


def shell(block, changes, cwd):
    for theirs, ours in changes.items():
        block = block.replace(theirs, str(ours))
    subprocess.run(["sh", "-e", "-c", block], cwd=cwd, check=True, capture_output=True, timeout=200)


@pytest.mark.long
def test_the_journal_is_backed_up_while_the_service_runs_and_restored(tmp_path):
    save_run(tmp_path / "runs" / "a", (1, 2))
    changes = {
        "/backup": tmp_path / "backup",
        "/var/lib/shardckpt": tmp_path / "state",
        "/etc/shardckpt/tokens": tmp_path / "tokens",
    }
    with operated(tmp_path, ("lab", tmp_path / "runs")) as lab:
        lab.done("verify", checkpoint="lab/a/1")
        shell(BACKUP, changes, tmp_path)
        lab.done("pin", checkpoint="lab/a/2")
        tokens = lab.tokens
    assert {one.name for one in (tmp_path / "backup").iterdir()} == {"journal.sqlite", "tokens"}
    shutil.rmtree(tmp_path / "state")
    (tmp_path / "state").mkdir()
    (tmp_path / "tokens").unlink()
    shell(RESTORE, changes, tmp_path)
    with serving(
        ("lab", tmp_path / "runs"), token_file=tmp_path / "tokens", state=tmp_path / "state"
    ) as service:
        headers = {"Authorization": f"Bearer {tokens['read']}"}
        assert [one["operation"] for one in service.get("/v1/jobs", **headers)["jobs"]] == [
            "verify"
        ]
        checkpoints = {
            one["id"]: one for one in service.get("/v1/checkpoints", **headers)["checkpoints"]
        }
        assert checkpoints["lab/a/1"]["verification"]["ok"]
        assert checkpoints["lab/a/2"]["pinned"]  # in the storage


def test_a_journal_of_the_release_before_is_used_and_goes_back(tmp_path):
    journal = Journal(tmp_path)
    given = {"subject": "lab/a", "destination": None, "who": "ann", "key": None}
    number = journal.add("verify", {}, {"checkpoint": "lab/a"}, **given)[0].number
    journal.close()
    with sqlite3.connect(tmp_path / "journal.sqlite") as old:  # as 0.2.0 has written it
        old.executescript("ALTER TABLE jobs DROP COLUMN roots; DROP TABLE saving;")
    journal = Journal(tmp_path)
    assert journal.job(number).roots is None
    assert journal.saving() == set()
    journal.add("verify", {}, {"checkpoint": "lab/a"}, **given)
    journal.close()
    with sqlite3.connect(tmp_path / "journal.sqlite") as old:
        assert old.execute("PRAGMA user_version").fetchone() == (1,)
        old.execute(
            "INSERT INTO jobs (operation, asked, arguments, subject, who, state, created) VALUES "
            "('pin', '', '', '', '', 'done', '')"
        )


def program(name, package):
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    assert path, (
        f"{name} is missing: `make deploy` installs it on Debian; elsewhere install {package}"
    )
    return path


FIRES = {
    "ShardckptDown": {'up{job="shardckpt"}': "0x60"},
    "ShardckptDamage": {"shardckpt_serve_damaged_checkpoints": "2x60"},
    "ShardckptRootVanished": {"shardckpt_serve_vanished_roots": "1x60"},
    "ShardckptRootUnreachable": {
        "shardckpt_serve_unreachable_roots": "1x60",
        "shardckpt_serve_vanished_roots": "0x60",
    },
    "ShardckptDirectoriesPassedOver": {"shardckpt_serve_passed_over_directories": "3x200"},
    "ShardckptJobsFail": {'shardckpt_serve_jobs{state="failed"}': "0+1x60"},
    "ShardckptScrubBehind": {"shardckpt_serve_scrub_due_bytes": "5x3000"},
    "ShardckptNoScans": {"shardckpt_serve_scans_total": "7x200"},
    "ShardckptErrors": {
        'shardckpt_serve_requests_total{status="503"}': "0+10x60",
        'shardckpt_serve_requests_total{status="200"}': "0+50x60",
    },
    "ShardckptWrongTokens": {"shardckpt_serve_wrong_tokens_total": "0+20x60"},
    "ShardckptBadTokenLines": {"shardckpt_serve_bad_token_lines": "1x60"},
}
"""Series, with a value a minute, for which each alert fires at the last but one."""


@pytest.mark.deploy
def test_promtool_accepts_the_alerts_and_each_fires_when_it_should(tmp_path):
    promtool = program("promtool", "prometheus")
    rules = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"][0]["rules"]
    assert {one["alert"] for one in rules} == FIRES.keys()
    subprocess.run(
        [promtool, "check", "rules", DEPLOY / "alerts.yaml"],
        check=True,
        capture_output=True,
        timeout=200,
    )
    tests = []
    for rule in rules:
        series = FIRES[rule["alert"]]
        minutes = max(int(values.rpartition("x")[2]) for values in series.values()) - 1
        labels = {"severity": rule["labels"]["severity"]}
        quiet = [
            {"series": name, "values": "1x60" if "up{" in name or "scans" in name else "0x60"}
            for name in series
        ]
        quiet = [one | {"values": "0+1x60"} if "scans" in one["series"] else one for one in quiet]
        tests.append(
            {
                "interval": "1m",
                "input_series": [
                    {"series": name, "values": values} for name, values in series.items()
                ],
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{rule["alert"]}", alertstate="firing", '
                        f'severity="{labels["severity"]}"}})',
                        "eval_time": f"{minutes}m",
                        "exp_samples": [{"labels": "{}", "value": 1}],
                    }
                ],
            }
        )
        silent = {
            "expr": f'ALERTS{{alertname="{rule["alert"]}"}}',
            "eval_time": "59m",
            "exp_samples": [],
        }
        tests.append({"interval": "1m", "input_series": quiet, "promql_expr_test": [silent]})
    (tmp_path / "test.yaml").write_text(
        yaml.safe_dump({"rule_files": [str(DEPLOY / "alerts.yaml")], "tests": tests})
    )
    done = subprocess.run(
        [promtool, "test", "rules", tmp_path / "test.yaml"],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.deploy
def test_systemd_accepts_the_unit(tmp_path):
    unit = (
        (DEPLOY / "shardckpt-serve.service")
        .read_text()
        .replace("/opt/shardckpt/bin/shardckpt", shutil.which("true"))
    )
    (tmp_path / "shardckpt-serve.service").write_text(unit)
    analyze = program("systemd-analyze", "systemd")
    done = subprocess.run(
        [analyze, "verify", tmp_path / "shardckpt-serve.service"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    mine = [line for line in done.stderr.splitlines() if "shardckpt-serve" in line]
    assert (done.returncode, mine) == (0, []), done.stderr


@contextmanager
def process_of(command, **how):
    with subprocess.Popen(command, **how) as process:
        try:
            yield process
        finally:
            process.terminate()


@pytest.mark.deploy
@pytest.mark.timeout(600)
def test_the_steps_of_the_dockerfile_make_a_service_that_is_healthy(tmp_path):
    """All of its steps but `useradd`, without a daemon: in a fresh directory, from the files that
    an image would get."""
    text = (DEPLOY / "Dockerfile").read_text()
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    listed = (
        subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
        .stdout.decode()
        .split("\0")
    )
    for name in filter(None, listed):
        if (
            not any(
                fnmatch(part, one.removeprefix("**/"))
                for part in name.split("/")
                for one in ignored
            )
            and (ROOT / name).exists()
        ):
            (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / "src" / name)
    save_run(tmp_path / "runs" / "a", (1,))
    (tmp_path / "etc").mkdir()
    token = add_token(tmp_path / "etc" / "tokens", "ann", "read")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    changes = {
        "/opt/shardckpt": f"{tmp_path}/opt",
        "/src[": f"{tmp_path}/src[",
        "/etc/shardckpt": f"{tmp_path}/etc",
        "/var/lib/shardckpt": f"{tmp_path}/state",
        "127.0.0.1:8470": f"127.0.0.1:{port}",
        "python -m venv": f"{sys.executable} -m venv",
    }
    for theirs, ours in changes.items():
        assert theirs in text
        text = text.replace(theirs, ours)
    run, *others = re.findall(r"^RUN (.*)$", text, re.MULTILINE)
    assert [one.split()[0] for one in others] == ["useradd"]
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL"))
    }
    subprocess.run(
        ["sh", "-e", "-c", run],
        cwd=tmp_path,
        env=clean,
        check=True,
        capture_output=True,
        timeout=550,
    )
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[1])
    check = json.loads(re.search(r"^HEALTHCHECK .*CMD (\[.*\])$", text, re.MULTILINE)[1])
    command = [*entry, f"runs={tmp_path}/runs", "--port", str(port)]
    with process_of(
        command, cwd=tmp_path, env=clean, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        end = time.monotonic() + 60
        while subprocess.run(check, env=clean, capture_output=True).returncode:
            assert process.poll() is None, shlex.join(command)
            assert time.monotonic() < end
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/v1/runs", headers={"Authorization": f"Bearer {token}"})
        assert connection.getresponse().status == 200
        connection.close()
