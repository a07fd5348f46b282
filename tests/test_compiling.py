"""A compiled run: the same run to float tolerance, few graphs, checkpoints as ever."""

import lightning
import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves

from foundry_lightning import (
    DataPipeline,
    DistilMLMConfig,
    DistilMLMTrainer,
    MLMConfig,
    MLMLitModule,
    MLMTrainer,
    block_losses,
)
from foundry_lightning.compiling import compile_layers
from foundry_lightning.losses import vocabulary_loss
from tests.conftest import texts, tiny_bert
from tests.test_losses import leaves, make_labels, make_scored
from tests.test_packing import FAMILIES, SMALL, made

SETTINGS = {"learning_rate": 1e-3, "progress_bar": False, "device": "cpu"}


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def trained(tokenizer, *, steps=8, resume=None, **config):
    trainer = MLMTrainer(tiny_bert(len(tokenizer), dropout=0.1), tokenizer, MLMConfig(**SETTINGS, **config))
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
def test_a_compiled_run_resumes_to_the_bit(tokenizer, tmp_path):
    whole, expected = trained(tokenizer, compile=True, save_every=3, save_dir=str(tmp_path))
    torch.compiler.reset()
    resumed, found = trained(tokenizer, compile=True, resume=tmp_path / "step=00000003.ckpt")
    assert found["losses"] == expected["losses"][3:]
    for one, other in zip(whole.student.parameters(), resumed.student.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_machine_without_compiler_is_told_before_the_first_update(tokenizer):
    wrong = {"cpp.cxx": (None, "no-such-compiler"), "force_disable_caches": True}
    said = r"^compile is True, but .* does not work on cpu here \(.*InvalidCxxCompiler.*set compile to False\.$"
    with torch._inductor.config.patch(wrong), pytest.raises(ValueError, match=said):
        trained(tokenizer, compile=True)


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
    assert 0 < counters["stats"]["unique_graphs"] <= 3  # a trial; the last batch is smaller


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


def losses_of(compiled, *, rows, classes, **settings):
    student, teacher = make_scored(rows, 4, classes), make_scored(rows, 6, classes, seed=5)
    labels = make_labels(rows, classes)
    loss = vocabulary_loss(student, labels=labels, teacher=teacher, compiled=compiled, **settings)
    return loss, torch.autograd.grad(loss.total, leaves(student))


@pytest.mark.slow
@pytest.mark.parametrize("weights", [(0.02, 0.0), (0.0, 0.05), (0.02, 0.05)], ids=["mlm", "distill", "both"])
def test_the_compiled_loss_is_the_plain_one_in_few_graphs_for_any_size(weights, monkeypatch):
    monkeypatch.setattr(block_losses, "_PART_BYTES", 4 * 2**10)  # several parts
    for rows, classes in ((16, 500), (31, 611), (64, 500), (97, 702), (30, 1200)):
        settings = {"mlm_weight": weights[0], "distill_weight": weights[1], "num_shared_classes": classes - 40}
        plain, compiled = (losses_of(form, rows=rows, classes=classes, **settings) for form in (False, True))
        torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-6)
    # sums and gradient, of the classes that the models share and of the student's other ones
    assert counters["stats"]["unique_graphs"] == (4 if all(weights) else 2)
    assert not counters["graph_break"]


@pytest.mark.slow
def test_a_compiled_block_takes_no_more_memory():
    def largest(compiled):
        with torch.profiler.profile(profile_memory=True) as profile:
            losses_of(compiled, rows=64, classes=20_000, distill_weight=1.0)
        return sum(max(0, event.self_cpu_memory_usage) for event in profile.events())

    largest(True)
    assert largest(True) <= largest(False)


@pytest.mark.slow
def test_a_process_compiles_more_models_than_torch_would_by_itself():
    """torch counts the graphs of all models together, since their layers are entered by the same lines."""
    with torch._dynamo.config.patch(recompile_limit=8), torch.no_grad():  # torch's own
        for width in range(1, 11):
            model = made("BertConfig", **{**SMALL, "hidden_size": 8 * width})
            compile_layers(model)
            model(input_ids=torch.full((2, 8), 5))
            assert counters["stats"]["unique_graphs"] == width


def test_the_check_for_parameters_without_gradient_compiles_nothing(tokenizer):
    module = MLMLitModule(tiny_bert(len(tokenizer)), config=MLMConfig(compile=True), tokenizer=tokenizer)
    module.prepare()
    module.trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    assert module.parameters_without_gradient() == {}
    assert counters["stats"]["unique_graphs"] == 0
