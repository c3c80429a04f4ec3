"""The schema of every configuration and its defaults; importable without torch or Hydra.

The dataclasses hold types and defaults, the YAML files of ``conf/`` hold choices only. `register` puts the
dataclasses into Hydra's ConfigStore; `typed` turns a composed configuration into one of them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omegaconf import DictConfig

EXPERIMENTS: dict[str, str] = {"mse-eval": "grpo_repro.experiments.mse_eval"}
"""Name of each experiment on the command line and the module that implements it."""

BUNDLED_MODELS = ("bundled-base", "bundled-instruct", "bundled-icl")
"""What `mse-eval` runs when no model is named."""

ESTIMATORS = ("vanilla", "grpo", "oracle", "optimal")
METHODS = ("exact", "components", "monte_carlo")
SAMPLERS = ("torch",)
DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")
MODEL_KINDS = ("causal_lm", "tabular")

LARGEST: dict[str, int] = {
    "group_sizes": 2**20,
    "completions_per_prompt": 10**7,
    "replicates": 10**6,
    "seeds": 2**63 - 1,
    "max_new_tokens": 10**6,
    "micro_batch": 10**7,
    "gradient_memory_gib": 10**5,
    "task.num_questions": 10**6,
    "task.seed": 2**63 - 1,
    "task.operand_max": 10**6,
    "task.factor_max": 10**6,
}
"""Largest values: beyond them no machine has the memory or the time, and integers leave 64 bits."""


@dataclass
class ModelConfig:
    """One policy.

    Attributes:
        name: What results and figures call it.
        kind: `causal_lm` (any transformers causal language model) or `tabular` (exact).
        path: Directory, Hugging Face id, or `bundled:base` / `bundled:instruct`.
        revision: Revision of a Hugging Face model.
        template: The prompt; `{question}` is replaced by the question, demonstrations are part of it. The two
            characters backslash and n (or t) stand for a newline (or a tab).
        chat: Whether the tokenizer's chat template is put around the prompt.
        dtype: Type of the weights; `auto` is the checkpoint's.
        trust_remote_code: Whether code that comes with the model may run.
        family: Family of a tabular policy.
        family_args: Arguments of that family.
    """

    name: str = ""
    kind: str = "causal_lm"
    path: str | None = None
    revision: str | None = None
    template: str = "{question}="
    chat: bool = False
    dtype: str = "auto"
    trust_remote_code: bool = False
    family: str | None = None
    family_args: dict[str, Any] = field(default_factory=dict)


@dataclass
class TaskConfig:
    """A set of questions with verifiable answers.

    Attributes:
        name: Name of the task.
        num_questions: Number of questions.
        split: `train` or `test`; the two are disjoint.
        seed: Seed of the questions.
        path: File or directory of the data, for tasks that read any.
        operand_min: Arithmetic: smallest operand of a sum or difference, left factor and quotient.
        operand_max: Arithmetic: largest of these.
        factor_min: Arithmetic: smallest right factor and divisor.
        factor_max: Arithmetic: largest right factor and divisor.
    """

    name: str = ""
    num_questions: int = 500
    split: str = "test"
    seed: int = 0
    path: str | None = None
    operand_min: int = 1
    operand_max: int = 30
    factor_min: int = 1
    factor_max: int = 10


@dataclass
class MseEvalConfig:
    """Figure 4: the mean squared error of each estimator against the group size.

    Attributes:
        model: The policy; None means the three bundled ones.
        task: The questions.
        estimators: Names of the estimators.
        methods: `exact`, `components` (one pool per prompt), `monte_carlo` (independent replicates).
        group_sizes: Numbers G of completions per prompt.
        completions_per_prompt: K, the pool of each prompt for `components`.
        replicates: Independent replicates at each G for `monte_carlo`.
        seeds: One cell for each.
        confidence: Level of the intervals.
        temperature: Of the sampling distribution, applied to its log-probabilities too.
        max_new_tokens: Longest completion, in tokens.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        sampler: Name of the sampler.
        micro_batch: Completions per forward pass; changes speed and memory only.
        gradient_memory_gib: Memory that per-sample gradients may take.
        results_dir: Folder of the results.
        threads: Threads of torch; None takes one for a model of less than 5 M parameters, else torch's default.
        dry_run: Print the plan and its estimated cost, run nothing.
    """

    model: ModelConfig | None = None
    task: TaskConfig = field(default_factory=TaskConfig)
    estimators: list[str] = field(default_factory=lambda: list(ESTIMATORS))
    methods: list[str] = field(default_factory=lambda: ["components", "monte_carlo"])
    group_sizes: list[int] = field(default_factory=lambda: [4, 8, 16, 32, 64])
    completions_per_prompt: int = 64
    replicates: int = 8
    seeds: list[int] = field(default_factory=lambda: [0])
    confidence: float = 0.95
    temperature: float = 1.0
    max_new_tokens: int = 8
    device: str = "auto"
    sampler: str = "torch"
    micro_batch: int = 256
    gradient_memory_gib: float = 2.0
    results_dir: str = "results"
    threads: int | None = None
    dry_run: bool = False


NESTED: dict[str, type] = {"model": ModelConfig, "task": TaskConfig}
"""Config groups of every experiment and their schemas."""


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
    # A nameless model instead of None: a sweep over models can then set `model.path` for all of them.
    store.store(group="schema", name="mse-eval", node=MseEvalConfig(model=ModelConfig()), package="_global_")


def typed(config: DictConfig) -> Any:
    """Turn a composed configuration into its dataclass, every interpolation resolved.

    Args:
        config: What Hydra composed from one of the schemas.

    Returns:
        An instance of the dataclass that is the schema; its `model` is None if nothing of one was set.

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
    for prefix, group in groups:
        for key in group or ():
            if f"{prefix}{key}" not in known:
                raise UserError(f"unknown key {prefix + str(key)!r}; leave out +{prefix}{key}")
    settings: Any = OmegaConf.to_object(config)
    if settings.model == ModelConfig():
        settings.model = None
    else:
        # A shell passes \n as two characters, and a prompt with a literal backslash would be wrong without a sign.
        settings.model.template = settings.model.template.replace("\\n", "\n").replace("\\t", "\t")
    return settings


def plain(config: Any) -> dict[str, Any]:
    """Return a configuration dataclass as nested dictionaries, fit for a cell or for YAML."""
    return asdict(config)


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
        if not prefix and item.name in NESTED:
            found += keys(NESTED[item.name], f"{item.name}.")
        found.append(prefix + item.name)
    return found
