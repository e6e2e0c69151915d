"""The forms that start jobs.

Each has a key of its own, so that it starts one job however often it is sent.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from shardckpt.reading.inspection.markup import Html, Part, el
from shardckpt.reading.naming.mapping_file import PRESETS
from shardckpt.serve.pages.frame import section
from shardckpt.text import visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardckpt.serve.pages.frame import Viewer

KEY, CONFIRM, RECORD = "key", "confirm", "record"
"""Names of fields that are not parameters of the operation."""


def actions_section(
    ident: str, deletable: Mapping[str, str], entry: Mapping[str, Any], viewer: Viewer
) -> Html | None:
    """Forms for the jobs that a viewer may start with a checkpoint; None: no job.

    `deletable` is that of `Upkeep.deletable`.
    """
    if not viewer.may("operate"):
        return None
    operates, admin, given = (
        viewer.may("operate", ident),
        viewer.may("admin", ident),
        {"checkpoint": ident},
    )
    buttons = []
    if operates and not entry.get("pinned"):
        buttons.append(job_form("pin", given, "Pin"))
    elif admin:
        buttons.append(job_form("unpin", given, "Unpin"))
    if admin:
        buttons += [
            job_form("untag", {**given, "tag": tag}, f"Remove tag {tag}")
            for tag in entry.get("tags", ())
        ]
    tag = (
        job_form("tag", given, "Add tag", [_field("tag", "tag", "Tag", "best")], style="line")
        if operates
        else None
    )
    copy = [_field("copy", "to", "Copy to", "lab/copies/100"), *_overwrite("copy", viewer)]
    export = [
        _field("export", "to", "Write to", "lab/exports/model.safetensors"),
        _field("export", "dtype", "Convert to dtype", "as stored", required=False),
        _lines("export", "include", "Only names that match, a pattern a line", "model/**"),
        *_overwrite("export", viewer),
    ]
    about_export = "Writes safetensors: a file, or a directory as on Hugging Face."
    parts = [
        el("div", buttons, class_="buttons") if buttons else None,
        tag,
        disclosed(
            "Copy",
            "Writes the same checkpoint to another place.",
            job_form("copy", given, "Start copy", copy),
        ),
        disclosed("Export", about_export, job_form("export", given, "Start export", export)),
    ]
    return section("Actions", *parts, _delete(ident, deletable, entry) if admin else None)


def reshard_section(ident: str, asked: Mapping[str, Any], viewer: Viewer) -> Html | None:
    """The form that starts the reshard of a plan; None: the viewer may not."""
    if not viewer.may("operate"):
        return None
    given = {"checkpoint": ident, **{name: asked[name] for name in ("mesh", "rule", "preset")}}
    fields = [
        _field("reshard", "to", "Write to", "lab/resharded/100"),
        *_overwrite("reshard", viewer),
    ]
    hint = el("p", "The source stays as it is. The options are those of the plan.", class_="quiet")
    return section("Start this reshard", hint, job_form("reshard", given, "Start reshard", fields))


def import_form(viewer: Viewer) -> Html | None:
    """The form that starts an import; None: the viewer may not."""
    if not viewer.may("operate"):
        return None
    fields = [
        _field("import", "from", "File or directory", "lab/downloads/llama"),
        _field("import", "to", "Write to", "lab/imported/llama"),
        _field("import", "into", "Put the state below the name", "model", required=False),
        _field("import", "mesh", "Mesh", "data=2,model=4", required=False),
        _lines("import", "rule", "Rules, one a line", "model/**=(model,None)"),
        el(
            "label",
            "Mapping of names ",
            choice("mapping", "import-mapping", ("", *PRESETS), None, "none"),
        ),
        *_overwrite("import", viewer),
    ]
    hint = (
        "Reads safetensors, DCP, Orbax and others below a root. Formats that need a pickle are "
        "refused."
    )
    return disclosed(
        "Import a checkpoint of another format",
        hint,
        job_form("import", {}, "Start import", fields),
    )


def again_form(operation: str, arguments: Mapping[str, Any]) -> Html | None:
    """The button that starts a job with the arguments of an earlier one.

    None: its operation deletes.
    """
    return (
        None if operation in ("delete", "retain") else job_form(operation, arguments, "Start again")
    )


def cancel_form(number: int) -> Html:
    """The button that cancels a job."""
    return el(
        "form",
        el("button", "Cancel", type="submit", class_="danger"),
        method="post",
        action=f"/ui/job/{number}/cancel",
    )


def job_form(
    operation: str,
    given: Mapping[str, Any],
    text: str,
    fields: Iterable[Html] = (),
    *,
    style: str = "fields",
    danger: bool = False,
) -> Html:
    """A form that starts a job.

    Args:
        operation: name of its operation.
        given: arguments that are not asked for; None, False and empty ones are left out.
        text: what is written on the button.
        fields: what is asked for.
        style: class of the form.
        danger: whether the button is marked as one that destroys.
    """
    fields = list(fields)
    hidden = [_hidden(KEY, secrets.token_urlsafe(16))]
    for name, value in given.items():
        values = value if isinstance(value, list) else ["true" if value is True else value]
        hidden += [_hidden(name, str(one)) for one in values if one not in (None, False, "")]
    button = el("button", text, type="submit", class_="danger" if danger else None)
    return el(
        "form",
        hidden,
        fields,
        button,
        method="post",
        action=f"/ui/jobs/{operation}",
        class_=style if fields else None,
    )


def choice(
    name: str,
    ident: str,
    values: Iterable[str],
    chosen: str | None,
    nothing: str,
    shown: Mapping[str, str] | None = None,
) -> Html:
    """A selection of one text; an empty one is shown as `nothing`, others as `shown` says."""
    words = {"": nothing} | dict(shown or {})
    options = [
        el("option", words.get(value, value), value=value, selected=value == (chosen or ""))
        for value in values
    ]
    return el("select", options, name=name, id=ident)


def _delete(ident: str, deletable: Mapping[str, str], entry: Mapping[str, Any]) -> Html:
    protected = [
        word
        for word, is_so in (("pinned", entry.get("pinned")), ("tagged", entry.get("tags")))
        if is_so
    ]
    if protected:
        return disclosed(
            "Delete", f"The checkpoint is {' and '.join(protected)}, and cannot be deleted."
        )
    fields = [
        _field("delete", CONFIRM, f"Type {visible(ident)} to confirm", ""),
        _field("delete", "reason", "Reason", "on request", required=False),
    ]
    form = job_form(
        "delete", {"checkpoint": ident, **deletable}, "Delete for ever", fields, danger=True
    )
    return disclosed("Delete", "Deletes the checkpoint and its data. This cannot be undone.", form)


def _overwrite(operation: str, viewer: Viewer) -> list[Html]:
    ticked = el(
        "input", type="checkbox", name="overwrite", value="true", id=f"{operation}-overwrite"
    )
    return [el("label", ticked, " replace what is there")] if viewer.may("admin") else []


def disclosed(title: str, hint: str, form: Part = None) -> Html:
    """A form that is folded at first."""
    return el("details", el("summary", title), el("p", hint, class_="quiet"), form, class_="action")


def _field(operation: str, name: str, label: str, hint: str, *, required: bool = True) -> Html:
    given = {
        "placeholder": hint or None,
        "required": required,
        "maxlength": 1000,
        "autocomplete": "off",
        "spellcheck": "false",
    }
    return el(
        "label", f"{label} ", el("input", type="text", name=name, id=f"{operation}-{name}", **given)
    )


def _lines(operation: str, name: str, label: str, hint: str) -> Html:
    given = {"placeholder": hint, "rows": 2, "spellcheck": "false"}
    return el(
        "label", f"{label} ", el("textarea", "", name=name, id=f"{operation}-{name}", **given)
    )


def _hidden(name: str, value: str) -> Html:
    return el("input", type="hidden", name=name, value=value)
