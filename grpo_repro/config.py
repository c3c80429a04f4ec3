"""Configurations: from the schema and the YAML files to typed values; importable without torch or Hydra.

The dataclasses of `schema` hold types and defaults, the YAML files of ``conf/`` hold choices only. `register` puts the
dataclasses into Hydra's ConfigStore; `typed` turns a composed configuration into one of them.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_repro.sampler_schema import VllmConfig
from grpo_repro.schema import (
    WORDED_TASKS,
    WORDED_TEMPLATE,
    BudgetConfig,
    GroupSizeConfig,
    IterationsConfig,
    ModelConfig,
    MseEvalConfig,
    TaskConfig,
    TheoryConfig,
    TrainConfig,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

EXPERIMENTS: dict[str, str] = {
    "mse-eval": "grpo_repro.experiments.mse_eval",
    **dict.fromkeys(("train", "group-size", "budget", "iterations"), "grpo_repro.experiments.training"),
    "theory": "grpo_repro.experiments.theory",
}
"""Name of each experiment and the module that implements it."""

COMMANDS: dict[str, str] = {name: f"sweep {name}" for name in ("group-size", "budget", "iterations")}
"""What is typed after `grpo` to run an experiment, where it is not its name."""

PAPER: dict[str, tuple[str, ...]] = {
    "fig4": ("mse-eval",),
    "fig5": ("group-size", "iterations"),
    "table2": ("budget",),
}
"""Settings of the paper's figures in `conf/paper`, and the experiments that they are of."""

BUNDLED_MODELS = ("bundled-base", "bundled-instruct", "bundled-icl")
"""What `mse-eval` runs when neither `model` nor `models` is named."""

SCHEMAS: dict[str, type] = {
    "mse-eval": MseEvalConfig,
    "train": TrainConfig,
    "group-size": GroupSizeConfig,
    "budget": BudgetConfig,
    "iterations": IterationsConfig,
    "theory": TheoryConfig,
}
"""Schema of each experiment."""

NESTED: dict[str, type] = {"model": ModelConfig, "task": TaskConfig, "vllm": VllmConfig}
"""Groups of keys of the experiments that have a policy, and their schemas; `conf/` has choices of the first two."""


def conf_dir() -> Path:
    """Return the folder of the YAML files.

    Returns:
        `grpo_repro/conf` where the wheel puts it, or `conf/` beside the package in a checkout.

    Raises:
        FileNotFoundError: If there is neither.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "experiment").is_dir():
            return folder
    raise FileNotFoundError(f"no conf folder in {package} or beside it; install grpo-repro again")


def choices(group: str) -> list[str]:
    """Return the options of a group of ``conf/``, such as ``model`` or ``task``, sorted."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def register() -> None:
    """Put the schema of every experiment into Hydra's ConfigStore (again is harmless)."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    for name, schema in SCHEMAS.items():
        # A nameless model instead of None: a sweep over models can then set `model.path` for all of them.
        node = schema(model=ModelConfig()) if "model" in keys(schema) else schema()
        store.store(group="schema", name=name, node=node, package="_global_")


def typed(config: DictConfig) -> Any:
    """Turn a composed configuration into its dataclass, every interpolation resolved.

    Args:
        config: What Hydra composed from one of the schemas.

    Returns:
        An instance of the dataclass that is the schema; its `model`, if it has one, is None if nothing of it was set.

    Raises:
        UserError: If a key was added that the schema does not have.
        omegaconf.errors.OmegaConfBaseException: If a value is missing or cannot be resolved.
    """
    from omegaconf import OmegaConf

    from grpo_repro.errors import UserError

    schema = OmegaConf.get_type(config)
    assert schema is not None
    known = set(keys(schema))
    groups = [("", config)] + [(f"{group}.", config[group]) for group in NESTED if group in config]
    if config.get("model") is not None:
        groups.append(("model.lora.", config["model"]["lora"]))
    for prefix, group in groups:
        for key in group or ():
            if f"{prefix}{key}" not in known:
                raise UserError(f"unknown key {prefix + str(key)!r}; leave out +{prefix}{key}")
    settings: Any = OmegaConf.to_object(config)
    if "model" not in known:
        return settings
    if settings.model == ModelConfig():
        settings.model = None
    else:
        if settings.model.kind == "tabular" and settings.model.family is None:
            family, arguments = settings.tabular_family
            settings.model.family, settings.model.family_args = family, arguments | settings.model.family_args
        if settings.task.name in WORDED_TASKS and settings.model.template == ModelConfig.template:
            settings.model.template = WORDED_TEMPLATE
        # A shell passes \n as two characters, and a prompt with a literal backslash would be wrong without a sign.
        settings.model.template = settings.model.template.replace("\\n", "\n").replace("\\t", "\t")
    if settings.task.instruction is not None:
        settings.task.instruction = settings.task.instruction.replace("\\n", "\n")
    return settings


def load_choice(group: str, name: str, overrides: list[str] | None = None) -> Any:
    """Read one option of a group without Hydra, as its dataclass.

    Args:
        group: `model` or `task`.
        name: Name of the option.
        overrides: `key=value` strings, keys relative to the group.

    Returns:
        A ModelConfig or TaskConfig.

    Raises:
        UserError: If the option is unknown.
        omegaconf.errors.OmegaConfBaseException: If a key or a value does not fit.
    """
    from omegaconf import OmegaConf

    from grpo_repro.errors import UserError

    known = choices(group)
    if name not in known:
        raise UserError(f"unknown {group} {name!r}; known: {', '.join(known)}")
    chosen = OmegaConf.load(conf_dir() / group / f"{name}.yaml")
    assert isinstance(chosen, type(OmegaConf.create({})))
    chosen.pop("defaults", None)
    schema = OmegaConf.structured(NESTED[group])
    return OmegaConf.to_object(OmegaConf.merge(schema, chosen, OmegaConf.from_dotlist(overrides or [])))


def keys(schema: type, prefix: str = "") -> list[str]:
    """Return every key of a schema in dotted form, such as ``group_sizes`` and ``task.split``."""
    found: list[str] = []
    for item in fields(schema):
        nested = NESTED.get(item.name) if not prefix else item.default_factory
        if isinstance(nested, type) and is_dataclass(nested):
            found += keys(nested, f"{prefix}{item.name}.")
        found.append(prefix + item.name)
    return found
