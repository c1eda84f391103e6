"""Budgets of `experiments.advise`, the file that it leaves, and a row of its table."""

import numpy as np
import pytest

from experiments.language import advise
from experiments.models import advice, models
from rqjax import METHODS
from rqjax.nn import load_decoder, save_calibration
from rqjax.nn.advise import Sensitivities, rates
from tests.nn.test_calibration import CHECKPOINTS, KEY, checkpoint

pytestmark = pytest.mark.full


def made_up(dim):
    """Sensitivities of two layers, the second a hundredth as sensitive."""
    bits = [METHODS["eden"](KEY, dim, b).bits_per_vector / dim for b in rates("eden")]
    kl = np.array([1, 0.01])[:, None, None] * 4.0 ** -np.array(rates("eden")) * np.ones((2, 2, 1))
    return Sensitivities("eden", np.tile(bits, (2, 2, 1)), kl, np.ones(2, bool))


def test_budgets_in_bits_bytes_and_tokens():
    assert advice.parse("2.5", 8192) == (2.5, None)
    assert advice.parse("3bits", 8192) == (3, None)
    assert advice.parse("20MB", 8192) == (20e6, 8192)
    assert advice.parse("40000tokens/GB", 8192) == (1e9, 40_000)
    for wrong in ("2.5 bits", "0", "-3", "MB", "3TB"):
        with pytest.raises(ValueError, match=r"expected a budget like 2\.5, 20MB or 40000tokens/GB, got"):
            advice.parse(wrong, 8192)


def test_a_budget_in_bytes_holds_all_of_the_cache(tmp_path):
    model, tokens, _ = checkpoint("llama")
    found, least = made_up(32), model.cache_nbytes("eden_1", 1, 4096)

    def under(amount):
        return advice.under(found, model, (amount, 4096), lambda names: model.calibrate(tokens, names, KEY))

    chosen, strategies = under(1.8 * least)
    assert 1.5 * least < model.cache_nbytes(strategies, 1, 4096) <= 1.8 * least
    assert chosen.rates[0].min() > chosen.rates[1].max()
    with pytest.raises(
        ValueError, match=r"expected a budget of at least 0\.\d+ MB for 4,096 tokens, the least of eden"
    ):
        under(0.5 * least)
    lines = advice.table(chosen).splitlines()
    assert len(lines) == 3
    assert advice.frontier(found, chosen, tmp_path / "made" / "frontier.png").stat().st_size > 0


def test_generate_finds_what_was_advised(tmp_path):
    model, tokens, _ = checkpoint("llama")
    with pytest.raises(
        FileNotFoundError, match=r"python -m experiments\.advise --model=.* --family=eden --budget=2\.5"
    ):
        models.strategies(model, str(tmp_path), "eden@2.5")
    with pytest.raises(KeyError, match="unknown family 'edn'; did you mean 'eden'"):
        models.strategies(model, str(tmp_path), "edn@2.5")
    made = model.calibrate(tokens, ["eden_3/eden_2", "eden_2/eden_1"], KEY)
    for name in ("eden@2.5", "eden@100tokens/GB"):
        save_calibration(made, model, tmp_path, name)
        again = models.strategies(load_decoder(CHECKPOINTS / "llama"), str(tmp_path), name)
        assert list(map(str, again)) == list(map(str, made))


@pytest.mark.full
def test_a_row():
    """Less lost in the same bits; by eden, four bits, the layers of qwen2-d64 differ enough for a small text."""
    point = {"model": "qwen2-d64", "family": "eden", "corpus": "", "keep": "16+4", "chunk": 16, "held_out": 4}
    point |= {"context": 256, "read": 256, "windows": 2}
    row = advise.run({**point, "draws": 2, "uniform_bits": 4})
    assert row["stored_bits"] <= 4.25
    assert row["kl_advised"] < row["kl_uniform"]
    assert row["over_uniform_sd"] > 0
    with pytest.raises(ValueError, match=r"expected uniform_bits of \(1, 1\.5, .*, got 2\.3"):
        advise.check({**point, "uniform_bits": 2.3})
