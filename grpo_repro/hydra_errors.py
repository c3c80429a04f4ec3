"""Hydra's and OmegaConf's errors as one message: the fact, the value, the remedy."""

from __future__ import annotations

import difflib
import re

from grpo_repro.config import NESTED, SCHEMAS, keys

_EXTRAS = {"ray": "ray", "submitit_local": "slurm", "submitit_slurm": "slurm", "joblib": "dev"}


def explain(error: BaseException, experiment: str, prefix: str = "") -> str:
    """Turn an error of Hydra or OmegaConf into one message for the user.

    Args:
        error: What was raised while the configuration was composed.
        experiment: Name of the experiment, for its keys.
        prefix: Only keys that begin with it were allowed, and were given without it; such as `task.`.

    Returns:
        One or two lines without a traceback.
    """
    # The plus signs are ours, see `launch`.
    return _explain(error, experiment, prefix).replace("++model.family_args", "model.family_args")


def _explain(error: BaseException, experiment: str, prefix: str) -> str:
    texts = [str(error)]
    override = getattr(error, "override", None)
    if override is not None:
        return _syntax(str(override), str(error))
    cause = error.__cause__
    while cause is not None:
        texts.append(str(cause))
        cause = cause.__cause__
    text = "\n".join(texts)
    known = [key.removeprefix(prefix) for key in keys(SCHEMAS[experiment]) if key.startswith(prefix)]
    for part in (_missing_option, _unknown_key, _ambiguous, _twice, _interpolation, _bad_value, _missing_value):
        message = part(text, known)
        if message is not None:
            return message
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _missing_option(text: str, known: list[str]) -> str | None:
    found = re.search(r"Could not find '([^']+)/([^'/]*)'", text)
    if found is None:
        return None
    group, name = found.groups()
    listed = re.search(r"Available options in '[^']*':\n((?:\t.*\n?)*)", text)
    options = listed.group(1).split() if listed else []
    if group == "hydra/launcher" and name in _EXTRAS:
        return (
            f"hydra/launcher={name} is not installed; pip install 'grpo-repro[{_EXTRAS[name]}]', "
            f"or use one of {', '.join(options)}"
        )
    return f"unknown {group} {name!r}; {_did_you_mean(name, options)}known: {', '.join(options)}"


def _unknown_key(text: str, known: list[str]) -> str | None:
    found = (
        re.search(r"Could not override '([^']+)'", text)
        or re.search(r"Could not append to config\..*?'([^']+)'", text)
        or re.search(r"full_key: (\S+)", text if "not in" in text else "")
    )
    if found is None:
        return None
    key = found.group(1)
    if key in known and "Could not append" in text:
        return f"{key} exists already; leave the + away: {key}=VALUE"
    if key.startswith("hydra."):
        return f"unknown key {key!r}; `grpo mse-eval --cfg hydra` shows the keys of hydra"
    group, dot, _ = key.rpartition(".")
    near = [other for other in known if other.rpartition(".")[:2] == (group, dot)] or known
    return f"unknown key {key!r}; {_did_you_mean(key, known)}known: {', '.join(near)}"


def _ambiguous(text: str, known: list[str]) -> str | None:
    found = re.search(r"Ambiguous value for argument '([^']+)'", text) or re.search(
        r"Sweep parameters '([^']+)' requires --multirun", text
    )
    if found is None:
        return None
    key, _, value = found.group(1).partition("=")
    as_list = "" if key in NESTED or "(" in value else f", for one list write '{key}=[{value}]'"
    return f"{found.group(1)} names several values; to run each of them add --multirun{as_list}"


def _twice(text: str, known: list[str]) -> str | None:
    found = re.search(r"Multiple values for (\S+?)\.", text)
    return f"{found.group(1)} is named more than once; keep one" if found else None


def _syntax(override: str, text: str) -> str:
    lines = [line.strip() for line in text.splitlines()]
    reasons = [line for line in lines if line and not line.startswith(("Error parsing", "See http", "^"))]
    reason = f" ({reasons[0]})" if reasons and override not in reasons[0] else ""
    return (
        f"cannot read the override {override!r}{reason}; write KEY=VALUE, and put a value with special "
        "characters in quotes twice: 'key=\"a b: c\"'"
    )


def _interpolation(text: str, known: list[str]) -> str | None:
    found = re.search(r"(Interpolation key '[^']+' not found|Environment variable '[^']+' not found)", text)
    found = found or re.search(r"(Unsupported interpolation type \S+|Interpolation .*)", text)
    key = re.search(r"full_key: (\S+)", text)
    if found is None:
        return None
    # The folder of a sweep's outcomes is derived from the folder of its results.
    name = key.group(1).replace("hydra.sweep.dir", "results_dir") if key else "a value"
    return f"{name} cannot be resolved: {found.group(1)}; name what exists, or give the value itself"


def _bad_value(text: str, known: list[str]) -> str | None:
    found = re.search(r"(Value .*|.*(?:is not|could not be|Cannot|Invalid).*)", text)
    if found is None:
        return None
    override = re.search(r"Error merging override (.+)", text)
    key = re.search(r"full_key: (\S+)", text)
    where = override.group(1) if override else key.group(1) if key else ""
    wanted = re.search(r"could not be converted to (\w+)", text)
    remedy = f"; give {_articles(wanted.group(1))}" if wanted else ""
    if "family_args" in where:
        return f"bad value {where}: {found.group(1).strip()}; give them one by one: model.family_args.KEY=VALUE"
    if "is not a ListConfig" in text or "with ListConfig" in text:
        remedy = f"; give a list: '{where.partition('=')[0]}=[...]'"
    return f"bad value {where}: {found.group(1).strip()}{remedy}"


def _missing_value(text: str, known: list[str]) -> str | None:
    found = re.search(r"(?:full_key: |Missing mandatory value: )(\S+)", text)
    return f"{found.group(1)} has no value; give it: {found.group(1)}=VALUE" if found else None


def _articles(kind: str) -> str:
    return {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}.get(kind, f"a {kind}")


def _did_you_mean(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}? " if close else ""
