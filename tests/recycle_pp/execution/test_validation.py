"""How many micro-batches a validation may have."""

from types import SimpleNamespace

import pytest

from recycle_pp.config.settings import Parallel, Run, Settings
from recycle_pp.execution.validation import held_out


def validation(samples, stages=8):
    settings = Settings(parallel=Parallel(stages=stages), run=Run(validate_samples=samples))
    return held_out(settings, SimpleNamespace(validations=300_000))


def test_a_validation_with_more_micro_batches_than_tags_is_refused():
    assert validation(1000) < 1000
    with pytest.raises(ValueError, match="with 8 stages a validation has at most 262143 micro-batches, not 300000"):
        validation("all")
