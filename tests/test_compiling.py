"""A compiled run: the same run to float tolerance, few graphs, checkpoints as ever."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

from foundry_lightning import DataPipeline, DistilMLMConfig, DistilMLMTrainer, MLMConfig, MLMTrainer
from foundry_lightning.compiling import compile_layers
from tests.conftest import texts, tiny_bert
from tests.test_packing import FAMILIES

SETTINGS = {"learning_rate": 1e-3, "progress_bar": False, "device": "cpu"}


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def trained(tokenizer, *, steps=8, resume=None, **config):
    trainer = MLMTrainer(tiny_bert(len(tokenizer), dropout=0.0), tokenizer, MLMConfig(**SETTINGS, **config))
    if resume is not None:
        trainer.resume_from_checkpoint(resume)
    pipe = DataPipeline(texts(64, high=30), tokenizer, batch_size=4, max_length=32)
    return trainer, trainer.train(pipe, shuffle=True, total_steps=steps)


@pytest.mark.slow
def test_a_compiled_run_is_the_plain_one_and_its_checkpoints_are_alike(tokenizer, tmp_path):
    (plain, expected), (compiled, found) = trained(tokenizer), trained(tokenizer, compile=True)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert counters["stats"]["unique_graphs"] > 0
    assert all(layer._compiled_call_impl is None for layer in compiled.student.modules())
    names = []
    for name, trainer in (("plain", plain), ("compiled", compiled)):
        state = torch.load(trainer.save_checkpoint(tmp_path / name), weights_only=True)
        names.append((state["state_dict"].keys(), len(tree_leaves(state["optimizer_states"]))))
    assert names[0] == names[1]
    for source, settings in (("plain", {"compile": True}), ("compiled", {})):
        resumed = trained(tokenizer, steps=10, resume=tmp_path / source, **settings)[1]
        assert len(resumed["losses"]) == 2


@pytest.mark.slow
def test_a_compiled_teacher_teaches_the_same_and_is_left_as_it_was(tokenizer):
    losses = []
    for compiled in (False, True):
        teacher = tiny_bert(len(tokenizer), seed=1)
        config = DistilMLMConfig(**SETTINGS, teacher_compile=compiled)
        trainer = DistilMLMTrainer(tiny_bert(len(tokenizer), dropout=0.0), teacher, tokenizer, config)
        pipe = DataPipeline(texts(32), tokenizer, batch_size=4, max_length=32, pack=True)
        losses.append(trainer.train(pipe)["losses"])
        assert all(layer._compiled_call_impl is None for layer in teacher.modules())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert 0 < counters["stats"]["unique_graphs"] <= 2  # the last batch is smaller


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "modernbert", "mpnet"])
def test_rows_of_many_widths_make_few_graphs(family):
    model = FAMILIES[family]()
    kinds = len(set(getattr(model.config, "layer_types", None) or [0]))
    compile_layers(model)
    for width in range(8, 40, 4):
        ids = torch.randint(5, 30, (3, width))
        model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.sum().backward()
    # the first width, then one graph for any width
    assert counters["stats"]["unique_graphs"] <= 2 * kinds
