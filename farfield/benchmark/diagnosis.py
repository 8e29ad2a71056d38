"""Section `diagnosis`: measuring why a model holds or fails, over evaluating it once."""

from __future__ import annotations

from functools import partial

from farfield.benchmark.pairing import Report, paired
from farfield.benchmark.plan import CALLS, Job, Setting, attention, where
from farfield.benchmark.rows import Row, timed
from farfield.diagnosis.diagnose import diagnose
from farfield.evaluation.ladder import evaluate
from farfield.evaluation.plan import LadderSettings

SECTION = "diagnosis"
BASELINE = "evaluation"
MEASURE = "diagnosis"


def jobs(setting: Setting) -> list[Job]:
    """One job for each mechanism of the recipe."""
    tokens, corpus = setting.sizes.context, setting.needed_workload.corpus
    tokens = min(tokens, len(corpus.test) - 1)
    found = []
    for mechanism in setting.needed_workload.mechanisms:
        config = setting.needed_workload.build(mechanism).config
        heads, layers = config.num_attention_heads, config.num_hidden_layers
        # A matrix product for each of attention's, and again as much for what is not one.
        once = 2 * layers * attention(tokens, heads, config.hidden_size // heads)
        found.append(
            Job(
                SECTION,
                f"{mechanism}, {tokens:,} tokens",
                CALLS * 3 * once,
                partial(_compare, setting, mechanism, tokens),
                seconds=10.0,
            )
        )
    return found


def _compare(
    setting: Setting, mechanism: str, tokens: int, allowance: float, report: Report
) -> list[Row]:
    """Untrained weights do: neither work depends on what they are."""
    workload, queries = setting.needed_workload, setting.sizes.queries
    model, stream = workload.build(mechanism).eval(), workload.corpus.test
    trained = workload.settings.length
    once = LadderSettings(lengths=(tokens,), tokens=tokens, protocols=("windows",))
    cases = {
        BASELINE: lambda: evaluate(
            model, stream, once, train_length=tokens, mechanism=mechanism, seed=setting.seed
        ),
        mechanism: lambda: diagnose(
            model, stream, [tokens], train_length=trained, name=mechanism, queries=queries,
            intervene=(),
        ),
    }  # fmt: skip
    samples = paired(cases, allowance, report=report)
    fields = where(
        setting, SECTION, measure=MEASURE, tokens=tokens,
        sizes=f"recipe {workload.recipe}, {queries} queries, no interventions",
    )  # fmt: skip
    return [timed(samples, mechanism, BASELINE, **fields)]
