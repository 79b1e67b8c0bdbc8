"""The help and the table of all settings."""

import dataclasses
from pathlib import Path

from recycle_pp.config.compose import compose
from recycle_pp.config.help import help_text, table
from recycle_pp.config.loading import flat
from recycle_pp.config.setting import rules
from recycle_pp.config.settings import Settings

DOCUMENTS = Path(__file__).parents[3] / "docs"


def test_the_help_describes_every_key():
    text = help_text()
    for key in flat(dataclasses.asdict(Settings())):
        assert (f"    {key}=" if "." in key else f"+{key}=") in text
    assert "torchrun --nproc-per-node=12" in text


def test_the_help_shows_what_is_allowed():
    lines = {line.split("=")[0].strip(): line for line in help_text().splitlines()}
    for key, rule in rules(Settings).items():
        if "." in key:
            assert rule.text in lines[key] and rule.allowed in lines[key]


def test_the_documented_table_is_that_of_the_code():
    text = (DOCUMENTS / "configuration.md").read_text()
    assert table() in text, "replace the table: python -m recycle_pp.config.help"


def test_the_help_says_that_a_node_that_joins_replaces_a_lost_one():
    assert "+join=RUN_DIR) replaces a lost node of a running job" in " ".join(help_text().split())


def test_the_documents_name_the_default_of_suspicion_and_its_value_on_a_cluster():
    local, cluster = (compose(words).control.suspicion for words in ([], ["control=cluster"]))
    for name in ("configuration.md", "own-data.md", "recovery.md"):
        text = " ".join((DOCUMENTS / name).read_text().split())
        assert f"{local:g} s, or {cluster:g} s with `control=cluster`" in text
    sentence = f"`control=cluster` sets `control.suspicion` to {cluster:g} s (default {local:g} s)."
    assert sentence in (DOCUMENTS / "cluster.md").read_text()
