"""The schema of every configuration: types, defaults and largest values; importable without torch or Hydra."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from grpo_repro.sampler_schema import VllmConfig

ESTIMATORS = ("vanilla", "grpo", "oracle", "optimal")
METHODS = ("exact", "components", "monte_carlo")
DTYPES = ("auto", "float32", "float64", "bfloat16", "float16")
MODEL_KINDS = ("causal_lm", "tabular")
OPTIMIZERS = ("auto", "adamw", "sgd")
SCHEDULES = ("constant", "inverse", "cosine")
PROMPT_ORDERS = ("iid", "epochs")
KL_ESTIMATORS = ("k3", "k1-in-reward")
SCORE_PARAMS = ("all", "last_layer", "lora")

LARGEST: dict[str, int] = {
    "group_sizes": 2**20,
    "completions_per_prompt": 10**7,
    "replicates": 10**6,
    "budget": 2**24,
    "iterations": 10**7,
    "warmup": 10**7,
    "minibatches": 2**24,
    "kl_coefficient": 10**6,
    "prompt_pool": 10**6,
    "eval_samples": 10**5,
    "runs": 10**6,
    "seeds": 2**63 - 1,
    "max_new_tokens": 10**6,
    "micro_batch": 10**7,
    "gradient_memory_gib": 10**5,
    "model.lora.rank": 2**16,
    "task.num_questions": 10**6,
    "task.seed": 2**63 - 1,
    "task.operand_max": 10**6,
    "task.factor_max": 10**6,
}
"""Largest values: beyond them no machine has the memory or the time, and integers leave 64 bits."""

WORDED_TASKS = ("gsm8k", "math")
"""Tasks of worded questions, read from a data set."""

WORDED_TEMPLATE = "{question}\n{instruction}\n"
"""The prompt of worded questions unless a template is given."""


@dataclass
class LoraSettings:
    """Low-rank adapters W + (alpha / rank) B A on a frozen model; no dropout.

    Attributes:
        rank: Inner dimension of B A; null or 0 is no adapters, every parameter is then trained.
        alpha: Its scale; null is twice the rank.
        targets: Last parts of the names of the layers that get one, such as [q_proj,v_proj]; null is every linear layer
            but the output layer.
    """

    rank: int | None = None
    alpha: float | None = None
    targets: list[str] | None = None

    @property
    def scale(self) -> float:
        """Alpha."""
        return 2.0 * (self.rank or 0) if self.alpha is None else self.alpha


@dataclass
class ModelConfig:
    """One policy.

    Attributes:
        name: What results and figures call it.
        kind: `causal_lm` (any transformers causal language model) or `tabular` (exact).
        path: Directory, Hugging Face id, or `bundled:base` / `bundled:instruct`.
        revision: Revision of a Hugging Face model.
        template: The prompt; `{question}` is replaced by the question and `{instruction}` by the task's instruction,
            demonstrations are part of it. The two characters backslash and n (or t) stand for a newline (or a tab).
            The default is arithmetic's; for a task with an instruction it stands for `WORDED_TEMPLATE`.
        chat: Whether the tokenizer's chat template is put around the prompt.
        dtype: Type of the weights. `auto` is float32 on a CPU and bfloat16 on a GPU; where all weights are trained it
            is float32 there too, for small updates are lost in the 8 bits of bfloat16. Adapters are always float32, and
            so are log-probabilities and everything behind the logits.
        trust_remote_code: Whether code that comes with the model may run.
        lora: Low-rank adapters, which are trained in place of the weights.
        family: Family of a tabular policy; null is `constant-norm` for `mse-eval`, `curved` with
            asymmetry 0.4 for training.
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
    lora: LoraSettings = field(default_factory=LoraSettings)
    family: str | None = None
    family_args: dict[str, Any] = field(default_factory=dict)


@dataclass
class TaskConfig:
    """A set of questions with verifiable answers.

    Attributes:
        name: Name of the task.
        num_questions: Number of questions; 0 takes all that a data set has.
        split: `train` or `test`, which are disjoint; `all` takes every question of a data set.
        seed: Seed of the questions.
        path: File or directory of a data set, instead of the hub's.
        operand_min: Arithmetic: smallest operand of a sum or difference, left factor and quotient.
        operand_max: Arithmetic: largest of these.
        factor_min: Arithmetic: smallest right factor and divisor.
        factor_max: Arithmetic: largest right factor and divisor.
        hub: Data set on the Hugging Face hub.
        subset: Its configuration there.
        revision: Its commit there.
        instruction: What `{instruction}` in the model's template stands for.
        format_reward: w; the reward of training is (accuracy + w format) / (1 + w), format being 1 where the answer is
            given in the form that the instruction asks for. Test questions are graded by accuracy alone.
        deadline: Seconds after which the comparison of one answer is given up, and counted as an error.
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
    hub: str | None = None
    subset: str | None = None
    revision: str | None = None
    instruction: str | None = None
    format_reward: float = 0.0
    deadline: float = 5.0


@dataclass
class MseEvalConfig:
    """Figure 4: the mean squared error of each estimator against the group size.

    Attributes:
        model: The policy; None means each of `models`.
        task: The questions.
        models: Policies, by their names in `conf/model`, run when no model is named; null is the three bundled.
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
        sampler, vllm: Where completions come from, `torch` (this engine) or `vllm`, and how that one runs.
        micro_batch: Completions per forward pass; changes speed and memory only.
        score_params: Parameters that gradients are taken of: `all`; `last_layer` (the last decoder block) or `lora`
            (the adapters of `model.lora`), whose gradients a large model leaves memory for.
        gradient_memory_gib: Memory that per-sample gradients may take.
        results_dir: Folder of the results.
        threads: Threads of torch; None takes one for a model of less than 5 M parameters, else torch's default.
        assumed_gpu: GPU that a dry run speaks of where there is none, a name of `machine.GPUS`; null is the CPU then.
        device_memory_gib: Memory of the device in the place of what is detected or known of it.
        utilization: Share of a GPU's peak rate that estimates of time assume.
        dry_run: Print the plan and its estimated cost, run nothing.
    """

    tabular_family: ClassVar[tuple[str, dict[str, Any]]] = ("constant-norm", {})

    model: ModelConfig | None = None
    task: TaskConfig = field(default_factory=TaskConfig)
    models: list[str] | None = None
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
    vllm: VllmConfig = field(default_factory=VllmConfig)
    micro_batch: int = 256
    score_params: str = "all"
    gradient_memory_gib: float = 2.0
    results_dir: str = "results"
    threads: int | None = None
    assumed_gpu: str | None = None
    device_memory_gib: float | None = None
    utilization: float = 0.25
    dry_run: bool = False


@dataclass
class TrainingConfig:
    """What every training experiment has.

    Attributes:
        model: The policy that is trained.
        task: The test questions (`split=test`); training draws from the other split of the same task.
        estimators: Names of the gradient estimators: grpo and vanilla; oracle and optimal on tabular policies only.
        group_sizes: Numbers G of completions per prompt; each divides every budget.
        iterations: Updates of a run.
        checkpoints: Iterations n at which the policy is evaluated, 0 being the initial one; null takes 0, a tenth, a
            quarter, a half and all of the iterations.
        seeds: One run for each; runs of one seed at several G share their questions and their test's randomness. Null
            is five seeds for language models and one for tabular policies, whose cells hold many runs.
        replicates: Tabular: independent runs in each cell.
        optimizer: `adamw` or `sgd`; `auto` is adamw for language models and sgd for tabular policies.
        learning_rate: Its rate beta; null is 1e-4 for adamw, 1 for sgd.
        schedule: `constant`, `inverse` (beta / i) or `cosine` (falling, to reach zero one
            iteration after the last).
        warmup: Iterations over which the rate rises to its value.
        weight_decay: Decoupled for adamw.
        clip_norm: Longest gradient; null for no clipping, `auto` is 1 for adamw and null for sgd.
        normalize: Divide the advantages by their group's standard deviation, A_i = (Z_i - C_i) / se with se^2 =
            sum_i (Z_i - mean(Z))^2 / (G - 1), and 0 where the rewards are equal (Algorithm 2); for grpo only.
        minibatches: m, the equal parts of an iteration's B prompts, each of which makes one step; later ones weigh each
            token by pi / pi_old. 1 is Algorithm 1; m divides every B = N / G.
        kl_coefficient: kappa of the penalty that keeps the policy near the initial one, pi_ref; 0 for none.
        kl_estimator: `k3` adds kappa (r - log r - 1), r = pi_ref / pi, to the loss of each token, with the gradient of
            KL(pi_ref || pi) of a token given those before it; `k1-in-reward` takes kappa log(pi / pi_ref) of the
            completion, less its leave-one-out mean, from the advantage, with the gradient of KL(pi || pi_ref).
        importance_cap: Another engine samples from mu, which is not quite the trainer's pi: multiply the advantage of
            each completion by min(pi(y) / mu(y), cap); null for no correction. For sampler=vllm.
        prompt_pool: Number of distinct training questions; null is 500 for language models, and for tabular policies
            the family's whole distribution.
        prompt_order: `iid` (with replacement) or `epochs` (each question once, shuffled, before any comes again).
        eval_samples: Completions per question of an evaluation.
        predict_seeds: Runs of these seeds also estimate G* from pools of completions at every checkpoint.
        completions_per_prompt: K, the size of these pools.
        log_every: Iterations over which training averages are taken; null is from one checkpoint to the next.
        confidence: Level of the intervals.
        temperature: Of the sampling distribution, in training and in evaluations.
        max_new_tokens: Longest completion, in tokens.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        sampler, vllm: Where completions come from, `torch` (this engine) or `vllm`, and how that one runs.
        micro_batch: Completions per forward pass; changes speed and memory only.
        gradient_checkpointing: Run the decoder's layers again in the backward pass, a third more time for a fraction of
            the memory of long completions; changes no number.
        gradient_memory_gib: Memory that the gradients behind the interval of G* may take.
        results_dir: Folder of the results.
        threads: Threads of torch; null takes one for a model of less than 5 M parameters, else torch's default.
        save_seconds: Longest time of work that a kill may cost, plus one iteration; a state that takes long to write is
            saved more seldom, so that this takes 5% of the time at most; 0 saves after every iteration.
        assumed_gpu: GPU that a dry run speaks of where there is none, a name of `machine.GPUS`; null is the CPU then.
        device_memory_gib: Memory of the device in the place of what is detected or known of it.
        utilization: Share of a GPU's peak rate that estimates of time assume.
        dry_run: Print the plan and its estimated cost, run nothing.
    """

    # Its best return is known, and with an asymmetry gradients differ between contexts at the optimum too (c1 > 0).
    tabular_family: ClassVar[tuple[str, dict[str, Any]]] = ("curved", {"asymmetry": 0.4})

    model: ModelConfig | None = None
    task: TaskConfig = field(default_factory=TaskConfig)
    estimators: list[str] = field(default_factory=lambda: ["grpo"])
    group_sizes: list[int] = field(default_factory=lambda: [2, 4, 8, 16, 32, 64])
    iterations: int = 100
    checkpoints: list[int] | None = None
    seeds: list[int] | None = None
    replicates: int = 1000
    optimizer: str = "auto"
    learning_rate: float | None = None
    schedule: str = "constant"
    warmup: int = 0
    weight_decay: float = 0.0
    clip_norm: str | None = "auto"
    normalize: bool = False
    minibatches: int = 1
    kl_coefficient: float = 0.0
    kl_estimator: str = "k3"
    importance_cap: float | None = None
    prompt_pool: int | None = None
    prompt_order: str = "iid"
    eval_samples: int = 4
    predict_seeds: list[int] = field(default_factory=lambda: [0])
    completions_per_prompt: int = 32
    log_every: int | None = None
    confidence: float = 0.95
    temperature: float = 1.0
    max_new_tokens: int = 8
    device: str = "auto"
    sampler: str = "torch"
    vllm: VllmConfig = field(default_factory=VllmConfig)
    micro_batch: int = 256
    gradient_checkpointing: bool = False
    gradient_memory_gib: float = 2.0
    results_dir: str = "results"
    threads: int | None = None
    save_seconds: float = 30.0
    assumed_gpu: str | None = None
    device_memory_gib: float | None = None
    utilization: float = 0.25
    dry_run: bool = False


@dataclass
class TrainConfig(TrainingConfig):
    """One run: of one group size and seed unless more are named."""

    budget: int = 256
    group_sizes: list[int] = field(default_factory=lambda: [8])
    seeds: list[int] | None = field(default_factory=lambda: [0])
    predict_seeds: list[int] = field(default_factory=list)
    log_every: int | None = 1


@dataclass
class GroupSizeConfig(TrainingConfig):
    """Figure 5: accuracy and suboptimality gap against G at a fixed budget, at every checkpoint n.

    Attributes:
        budget: N = B G, completions per iteration.
    """

    budget: int = 256


@dataclass
class IterationsConfig(GroupSizeConfig):
    """The best G against n: the runs of Figure 5, whose cells it shares while the keys are the same."""


@dataclass
class BudgetConfig(TrainingConfig):
    """Table 2: accuracy and suboptimality gap against N and G.

    Attributes:
        budgets: Numbers N of completions per iteration.
    """

    budgets: list[int] = field(default_factory=lambda: [64, 256, 1024])


@dataclass
class TheoryConfig:
    """Numerical checks of the paper's statements.

    Attributes:
        checks: Their names; null is all.
        runs: Simulated runs of Theorem 8; the other simulations take a fraction of it.
        seeds: One repetition of every check for each.
        confidence: Level of the intervals that decide: at the default a true statement fails in one of 10,000 seeds.
        results_dir: Folder of the results.
        threads: Threads of torch.
        dry_run: Print the plan and its estimated cost, run nothing.
    """

    checks: list[str] | None = None
    runs: int = 20_000
    seeds: list[int] = field(default_factory=lambda: [0])
    confidence: float = 0.9999
    results_dir: str = "results"
    threads: int | None = None
    dry_run: bool = False
