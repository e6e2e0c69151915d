"""jax.Arrays over 8 virtual devices of one process: shardckpt and Orbax."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from tools.bench.floors import floors
from tools.bench.measure import Run, Subject

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tools.bench.states import State

__all__ = ["GROUP", "subjects"]

GROUP = "jax.Arrays on 8 devices, one process"
DEVICES = 8


def subjects(state: State, directory: Path, operation: str) -> list[Subject]:
    """Everybody, with the same arrays."""
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    import jax
    import ml_dtypes
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from tools.bench.states import elements

    dtype = np.dtype(ml_dtypes.bfloat16) if state.dtype == "bfloat16" else np.dtype(state.dtype)
    arrays = elements(state)
    targets = (
        {name: np.ones_like(array) for name, array in arrays.items()}
        if operation == "stall"
        else arrays
    )
    devices = np.array(jax.devices())
    rows, both = Mesh(devices, ("x",)), Mesh(devices.reshape(2, 4), ("x", "y"))

    def laid_out(name: str, *, other: bool) -> Any:
        spec = P() if arrays[name].ndim == 1 else P("y", "x") if other else P("x")
        return NamedSharding(both if other else rows, spec)

    values = {
        name: jax.device_put(array.view(dtype), laid_out(name, other=False))
        for name, array in arrays.items()
    }
    jax.block_until_ready(values)
    shapes = {
        other: {
            n: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=laid_out(n, other=other))
            for n, v in values.items()
        }
        for other in (False, True)
    }
    eighths = {
        n: jax.ShapeDtypeStruct(
            (v.shape[0], v.shape[1] // DEVICES) if v.ndim > 1 else v.shape, v.dtype
        )
        for n, v in values.items()
    }

    def same(restored: dict[str, Any]) -> None:
        for name in (next(iter(values)), list(values)[-1]):
            if not np.array_equal(
                np.asarray(restored[name]).view(np.uint8), np.asarray(values[name]).view(np.uint8)
            ):
                raise AssertionError(f"{name} came back as something else")

    shards = {
        name: [arrays[name].view(dtype)[s.index] for s in value.addressable_shards]
        for name, value in values.items()
    }

    def place() -> Any:
        arrays = {
            name: jax.make_array_from_single_device_arrays(
                value.shape,
                value.sharding,
                [
                    jax.device_put(s, d.device)
                    for s, d in zip(shards[name], value.addressable_shards, strict=True)
                ],
            )
            for name, value in values.items()
        }
        return jax.block_until_ready(arrays)

    nbytes = state.nbytes
    columns = sum(e.size * e.dtype.itemsize for e in eighths.values())
    return [
        *floors(arrays, targets, directory, devices=DEVICES),
        Subject(
            "host shards to devices",
            {"restore": Run(place, nbytes, after=same)},
            "no file is read",
            floor=True,
        ),
        _ours(nbytes, columns, values, shapes, eighths, directory, same),
        *(
            _orbax(nbytes, columns, values, shapes, eighths, directory, same, best=best)
            for best in (False, True)
        ),
    ]


def _ours(
    nbytes: int,
    columns: int,
    values: dict[str, Any],
    shapes: dict[bool, dict[str, Any]],
    eighths: dict[str, Any],
    directory: Path,
    same: Callable[[Any], None],
) -> Subject:
    import jax

    import shardckpt
    from shardckpt import Box, SaveOptions

    options = SaveOptions(memory_limit="4GiB")
    out, kept, file = directory / "ours-out", directory / "ours", directory / "ours.safetensors"

    def there() -> None:
        if not kept.exists():
            shardckpt.save(kept, values, options=options)

    def restore(like: dict[str, Any]) -> Any:
        return jax.block_until_ready(shardckpt.restore(kept, like))

    def read_columns() -> Any:
        checkpoint = shardckpt.open(kept)
        return jax.block_until_ready(
            {
                n: jax.device_put(checkpoint.read(n, Box((0,) * len(e.shape), tuple(e.shape))))
                for n, e in eighths.items()
            }
        )

    return Subject(
        "shardckpt",
        {
            "save": Run(lambda: shardckpt.save(out, values, options=options), nbytes, writes=out),
            "stall": Run(
                lambda: shardckpt.save_async(out, values, options=options),
                nbytes,
                after=lambda h: h.wait(),
                writes=out,
            ),
            "restore": Run(lambda: restore(shapes[False]), nbytes, before=there, after=same),
            "other": Run(lambda: restore(shapes[True]), nbytes, before=there, after=same),
            "columns": Run(read_columns, columns, before=there),
            "export": Run(
                lambda: shardckpt.export_safetensors(kept, file), nbytes, before=there, writes=file
            ),
            "verify": Run(lambda: shardckpt.open(kept).verify(), nbytes, before=there),
        },
        "memory_limit=4GiB",
        checksums=True,
    )


def _orbax(
    nbytes: int,
    columns: int,
    values: dict[str, Any],
    shapes: dict[bool, dict[str, Any]],
    eighths: dict[str, Any],
    directory: Path,
    same: Callable[[Any], None],
    *,
    best: bool,
) -> Subject:
    import jax
    import orbax.checkpoint as ocp

    name = "Orbax, at its best" if best else "Orbax"
    # Neither compressing nor merging databases was the fastest of what it can be told.
    handler = (
        ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
        if best
        else ocp.PyTreeCheckpointHandler()
    )
    at_once, ahead = ocp.Checkpointer(handler), ocp.AsyncCheckpointer(handler)
    out, kept, file = directory / f"{name}-out", directory / name, directory / f"{name}.safetensors"

    def there() -> None:
        if not kept.exists():
            at_once.save(kept, args=ocp.args.PyTreeSave(values))

    def restore(like: dict[str, Any]) -> Any:
        how = {
            n: ocp.ArrayRestoreArgs(sharding=s.sharding, global_shape=s.shape)
            for n, s in like.items()
        }
        return jax.block_until_ready(
            at_once.restore(kept, args=ocp.args.PyTreeRestore(item=like, restore_args=how))
        )

    def restore_columns() -> Any:
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        how = {
            n: ocp.ArrayRestoreArgs(sharding=one, global_shape=e.shape, strict=False)
            for n, e in eighths.items()
        }
        return jax.block_until_ready(
            at_once.restore(kept, args=ocp.args.PyTreeRestore(item=eighths, restore_args=how))
        )

    def export() -> None:
        from safetensors.numpy import save_file

        how = {n: ocp.RestoreArgs(restore_type=np.ndarray) for n in values}
        arrays = at_once.restore(
            kept, args=ocp.args.PyTreeRestore(item=shapes[False], restore_args=how)
        )
        save_file(arrays, file)

    def finish(_none: None) -> None:
        ahead.wait_until_finished()

    runs = {
        "save": Run(
            lambda: at_once.save(out, args=ocp.args.PyTreeSave(values)), nbytes, writes=out
        ),
        "stall": Run(
            lambda: ahead.save(out, args=ocp.args.PyTreeSave(values)),
            nbytes,
            after=finish,
            writes=out,
        ),
        "restore": Run(lambda: restore(shapes[False]), nbytes, before=there, after=same),
        "other": Run(lambda: restore(shapes[True]), nbytes, before=there, after=same),
        "columns": Run(restore_columns, columns, before=there),
    }
    if not best:
        runs["export"] = Run(export, nbytes, before=there, writes=file)
    return Subject(
        name,
        runs,
        "use_ocdbt=False, use_compression=False"
        if best
        else "defaults; exports: restored as numpy, save_file",
    )
