"""Processes of a jax.distributed job, coordinated through the key-value store of its coordination
service."""

import socket

SCRIPT = "coordination_jax.py"


def test_processes_agree_share_and_announce_through_the_coordination_service(run_job):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    answers = run_job(SCRIPT, [(address, p) for p in range(2)], JAX_PLATFORMS="cpu")
    ids = sorted(i for answer in answers for i in answer["own ids"])
    assert len(set(ids)) == 4
    for p, answer in enumerate(answers):
        assert answer["kind"] == "JaxClient"
        assert answer["same object"]
        assert answer["world"] == [p, 2]
        assert answer["owners"]
        assert answer["all ids"] == ids
        assert answer["run_id"] == answers[0]["run_id"]
        assert answer["shared"] == [{"of": q, "text": "é/#"} for q in range(2)]
        assert answer["agreed"] == [7, 0]
        assert answer["before"] is None
        assert answer["peeked"] == 2
        assert answer["after the end"].startswith(
            "coordination: jax.distributed's coordination service does not answer ("
        )
        # It goes on running in two processes, which have no store any more.
        assert answer["alone"].startswith(
            "coordination: this JAX job runs in 2 processes and has no store in which they could "
            "meet;"
        )
