"""`shardckpt verify`."""


def damage(checkpoint):
    """Change one byte of the largest data file."""
    path = max(
        (p for p in checkpoint.rglob("hosts/*/*/d/*") if p.is_file()),
        key=lambda p: p.stat().st_size,
    )
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    return path.relative_to(checkpoint).as_posix()


def test_a_sound_checkpoint_is_ok(run, checkpoint):
    answer = run("verify", checkpoint)
    assert (answer.status, answer.err) == (0, "")
    assert answer.out.startswith(f"ok  {checkpoint}: ")
    assert answer.out.endswith("all as written\n")


def test_damage_is_listed_by_file_tensor_and_index_range(run, checkpoint):
    file = damage(checkpoint)
    answer = run("verify", checkpoint)
    assert answer.status == 1
    assert answer.out.startswith("damaged")
    assert f"\n  {file}\n" in answer.out
    assert "\n    model/embed [0:" in answer.out


def test_json_lists_the_damage(run, checkpoint):
    sound = run("verify", checkpoint, "--json")
    doc = sound.json
    assert (sound.status, doc["url"], doc["ok"], doc["damage"]) == (0, str(checkpoint), True, [])
    assert doc["chunks"] > 0
    assert doc["bytes_read"] >= 3872
    file = damage(checkpoint)
    answer = run("verify", checkpoint, "--json")
    assert answer.status == 1
    (entry,) = answer.json["damage"]
    assert (entry["tensor"], entry["file"], entry["start"]) == ("model/embed", file, [0, 0])
    assert "checksum" in entry["reason"]
    assert not answer.json["ok"]


def test_a_lost_chunk_table_is_damage(run, checkpoint):
    next(checkpoint.rglob("hosts/00000/table")).unlink()
    answer = run("verify", checkpoint, "--json")
    assert answer.status == 1
    assert any(
        entry["tensor"] is None and entry["file"].endswith("hosts/00000/table")
        for entry in answer.json["damage"]
    )


def test_long_lists_are_cut_off_for_people_and_whole_in_json(run, checkpoint, monkeypatch):
    monkeypatch.setattr("shardckpt.cli.verify.MOST_LINES", 2)
    next(checkpoint.rglob("hosts/00000/table")).unlink()
    next(path for path in checkpoint.glob("*/table")).unlink()
    entries = run("verify", checkpoint, "--json").json["damage"]
    assert len(entries) > 2
    assert run("verify", checkpoint).out.endswith(
        f"… and {len(entries) - 2} more; --json lists all\n"
    )
