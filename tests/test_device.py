"""What matters on a GPU and can be seen without one: default devices, host reads, types, what runs where."""

from __future__ import annotations

from types import SimpleNamespace

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import FSDPStrategy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DebertaV2Config, DebertaV2ForMaskedLM

from foundry_lightning import (
    DataPipeline,
    DistilMLMConfig,
    DistilMLMLitModule,
    DistilMLMTrainer,
    EncoderDistillConfig,
    EncoderDistillTrainer,
    MLMConfig,
    MLMDataModule,
    MLMLitModule,
    MLMTrainer,
)
from foundry_lightning.callbacks.console import CompareWithTeacher
from foundry_lightning.callbacks.samples import Samples
from foundry_lightning.checkpoint import use_current_settings
from foundry_lightning.facts import model_facts, warnings_of
from foundry_lightning.models import outputs_of, uses_flash_attention
from foundry_lightning.packing import find_padding
from foundry_lightning.projection import ScoredProjection, find_projection
from tests.conftest import texts, tiny_bert
from tests.several import in_ranks
from tests.test_packing import FAMILIES, SMALL, flash_bert, kernel, made  # noqa: F401  # a fixture

QUIET = {"device": "cpu", "progress_bar": False, "learning_rate": 1e-3}


def rows(tokenizer, **settings) -> DataPipeline:
    return DataPipeline(texts(24), tokenizer, **{"batch_size": 4, "max_length": 32, **settings})


def test_the_start_checks_stand_where_lightning_makes_the_gpu_the_default_device(tokenizer):
    """It calls configure_model so; the meta device stands for the GPU."""
    student, teacher = tiny_bert(len(tokenizer)), tiny_bert(len(tokenizer), seed=1)
    for module in (
        MLMLitModule(student, config=MLMConfig(), tokenizer=tokenizer),
        DistilMLMLitModule(student, teacher, config=DistilMLMConfig(), tokenizer=tokenizer),
    ):
        with torch.device("meta"):
            module.configure_model()
        assert isinstance(module.projection, ScoredProjection), module.projection.reason


class HostReads(TorchDispatchMode):
    """Counts what makes the host wait for the device."""

    WAITS = (
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.nonzero.default,
        torch.ops.aten._unique2.default,
    )

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in self.WAITS:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("masking", ["token", "whole_word", "span"])
@pytest.mark.parametrize("batches", [{"pack": True}, {"group_by_length": True}], ids=["packed", "padded"])
def test_a_step_makes_the_host_wait_for_nothing(tokenizer, monkeypatch, masking, batches):
    reads = []
    step = DistilMLMLitModule.training_step

    def watched(self, batch, batch_idx):
        with HostReads() as found:
            output = step(self, batch, batch_idx)
        reads.append(found.seen)
        return output

    monkeypatch.setattr(DistilMLMLitModule, "training_step", watched)
    monkeypatch.setattr("foundry_lightning.modules.base.answers_late", lambda device: True)
    monkeypatch.setattr("torch.isin", None)  # sorts by a size that the host reads, where many ids are special
    student, teacher = tiny_bert(len(tokenizer)), tiny_bert(len(tokenizer), seed=1)
    trainer = DistilMLMTrainer(student, teacher, tokenizer, DistilMLMConfig(**QUIET, masking=masking))
    trainer.train(rows(tokenizer, **batches), total_steps=3)
    assert reads == [[], [], []]


def test_padding_told_without_a_question_to_the_device_trains_alike(tokenizer, monkeypatch):
    """Texts of one length make batches without padding, of others batches with it."""
    lines, results = [*texts(12), *["the cat sat on the mat"] * 8], []
    for late in (False, True):
        monkeypatch.setattr("foundry_lightning.modules.base.answers_late", lambda device, late=late: late)
        student, teacher = tiny_bert(len(tokenizer), dropout=0.0), tiny_bert(len(tokenizer), seed=1)
        masks = []
        student.bert.register_forward_pre_hook(
            lambda model, args, kwargs, masks=masks: masks.append(kwargs["attention_mask"]), with_kwargs=True
        )
        trainer = DistilMLMTrainer(student, teacher, tokenizer, DistilMLMConfig(**QUIET))
        pipe = DataPipeline(lines, tokenizer, batch_size=4, max_length=32, group_by_length=True)
        results.append(trainer.train(pipe, pipe, total_steps=5)["losses"] + [trainer.evaluate(pipe)["loss"]])
        kinds = {None if mask is None else mask.dim() for mask in masks[-5:]}
        assert kinds == ({None, 4} if late else {2})
    assert results[1] == pytest.approx(results[0], rel=1e-4)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("mpnet", "WithMLMHead")])
def test_models_are_told_of_padding_so_that_attended_places_get_their_scores(family):
    model = FAMILIES[family]()
    padding = find_padding(model)
    assert padding is not None
    ids, attended = torch.randint(5, 30, (3, 16)), torch.arange(16) < torch.tensor([[16], [9], [12]])
    for mask in (attended, torch.ones_like(attended)):
        batch = {"attention_mask": mask.long(), "info": {"num_attended": int(mask.sum())}}
        found = outputs_of(model, {"input_ids": ids, "attention_mask": padding.padding(batch, dtype=torch.float32)})
        expected = outputs_of(model, {"input_ids": ids, "attention_mask": mask.long()})
        torch.testing.assert_close(found[mask], expected[mask], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["BigBirdConfig", "ConvBertConfig"])
def test_models_with_an_attention_of_their_own_are_told_of_padding_as_ever(family):
    assert find_padding(made(family, **SMALL)) is None


def test_validation_sums_stay_float64_where_the_module_is_half_precision(tokenizer):
    module = MLMLitModule(tiny_bert(len(tokenizer)), config=MLMConfig(), tokenizer=tokenizer)
    module.prepare()
    module.to(torch.bfloat16)
    assert module.student.dtype == torch.bfloat16
    metric = module.val_metric
    for _ in range(300):  # 257 is no number of bfloat16
        metric.update({"num_masked": 1}, **dict.fromkeys(metric.terms, torch.tensor(1.0)))
    assert metric.num_masked == 300
    metric.reset()
    assert metric.num_masked.dtype == torch.float64


def test_validation_sums_go_to_a_device_without_float64_as_float32(tokenizer, monkeypatch):
    module = MLMLitModule(tiny_bert(len(tokenizer)), config=MLMConfig(), tokenizer=tokenizer)
    module.prepare()

    place, to = torch.device("mps"), torch.Tensor.to

    def move(self, device):
        """Of a tensor that would be in MPS' memory, and where; any other call is one of the CPU's."""
        nonlocal place
        if torch.device("mps") in (place, device) and self.dtype == torch.float64:
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
            )
        place = device
        return to(self, "cpu")

    monkeypatch.setattr(torch.Tensor, "to", move)
    metric = module.val_metric
    for device, dtype in ((torch.device("mps"), torch.float32), (torch.device("cpu"), torch.float64)):
        place = torch.device("cpu") if device.type == "mps" else torch.device("mps")
        metric._apply(lambda _, device=device: SimpleNamespace(device=device))
        assert metric.num_masked.dtype == dtype


def test_a_fused_update_after_one_that_was_not_counts_its_steps_on_the_device():
    """A run in float16 can't fuse its update; the checkpoint it leaves can be gone on with in bfloat16."""
    parameter = torch.nn.Parameter(torch.empty(2, device="meta"))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3)
    optimizer.state[parameter]["step"] = torch.tensor(3.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = SimpleNamespace(optimizers=[optimizer], lr_scheduler_configs=[SimpleNamespace(scheduler=scheduler)])
    use_current_settings(trainer, [{"initial_lr": 1e-3, "fused": True}])
    assert optimizer.state[parameter]["step"].device.type == "meta"
    optimizer.state[parameter]["step"] = torch.tensor(3.0)
    use_current_settings(trainer, [{"initial_lr": 1e-3, "fused": False}])
    assert optimizer.state[parameter]["step"].device.type == "cpu"


def test_a_packed_mask_has_the_type_that_autocast_would_make_of_it(tokenizer):
    module = MLMLitModule(tiny_bert(len(tokenizer)), config=MLMConfig(), tokenizer=tokenizer)
    batch = {"input_ids": torch.tensor([[5, 6, 7]]), "text_ids": torch.tensor([[0, 0, 1]])}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mask = module.packing("student").inputs(batch)["attention_mask"]
    assert mask.dtype == torch.bfloat16
    assert mask.isfinite().all()


@pytest.mark.parametrize("of", ["student", "teacher"])
def test_a_packed_mask_has_the_type_that_the_trainer_makes_of_the_weights(tokenizer, of):
    """Lightning turns them into half precision after the packing was proven."""
    student, teacher = tiny_bert(len(tokenizer)), tiny_bert(len(tokenizer), seed=1)
    module = DistilMLMLitModule(student, teacher, config=DistilMLMConfig(), tokenizer=tokenizer)
    module.prove_packing(of)
    getattr(module, of).to(torch.bfloat16)
    batch = {"input_ids": torch.tensor([[5, 6, 7]]), "text_ids": torch.tensor([[0, 0, 1]])}
    assert module.inputs(batch, of=of)["attention_mask"].dtype == torch.bfloat16


def test_a_model_whose_tensors_name_no_device_is_checked_where_it_lies(tokenizer):
    """Relative positions of DeBERTa: on the GPU, while the model is still on the host."""
    config = DebertaV2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
    )
    module = MLMLitModule(DebertaV2ForMaskedLM(config), config=MLMConfig(), tokenizer=tokenizer)
    with torch.device("meta"):
        module.configure_model()
    assert isinstance(module.projection, ScoredProjection), module.projection.reason


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_gradients_are_clipped_by_value_where_the_update_is_fused(tokenizer, precision):
    largest = []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, module, *args):
            gradients = [p.grad for p in module.student.parameters() if p.grad is not None]
            largest.append(max(float(gradient.abs().max()) for gradient in gradients))

    config = MLMConfig(
        **QUIET,
        max_grad_norm=1e-3,
        trainer_kwargs={"gradient_clip_algorithm": "value", "precision": precision, "callbacks": [Watch()]},
    )
    MLMTrainer(tiny_bert(len(tokenizer)), tokenizer, config).train(rows(tokenizer), total_steps=2)
    assert largest == pytest.approx([1e-3, 1e-3])


@pytest.mark.usefixtures("_products_are_ieee_again")
def test_products_in_tf32_that_the_user_asks_one_backend_for_stop_no_proof():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
        torch.get_float32_matmul_precision()
    assert isinstance(find_projection(tiny_bert(30)), ScoredProjection)


def test_fsdp_with_clipping_is_refused_before_the_first_update(tokenizer):
    module = MLMLitModule(tiny_bert(len(tokenizer)), config=MLMConfig(), tokenizer=tokenizer)
    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, gradient_clip_val=1.0)
    trainer._accelerator_connector.strategy = FSDPStrategy()  # it starts on GPUs only
    module.trainer = trainer
    with pytest.raises(ValueError, match="clips no gradients of FSDP; set max_grad_norm=0"):
        module.configure_optimizers()


@pytest.fixture
def _products_are_ieee_again():
    yield
    torch.set_float32_matmul_precision("highest")
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"


@pytest.mark.usefixtures("_products_are_ieee_again")
@pytest.mark.parametrize(
    ("precision", "products", "told"),
    [("32-true", "ieee", True), ("32-true", "tf32", False), ("bf16-mixed", "ieee", False)],
)
def test_float32_on_a_gpu_with_tensor_cores_is_advised_against(monkeypatch, tokenizer, precision, products, told):
    trainer = MLMTrainer(tiny_bert(len(tokenizer)), tokenizer, MLMConfig(**QUIET))
    trainer.train(rows(tokenizer), total_steps=1)
    monkeypatch.setattr(MLMLitModule, "device", torch.device("cuda"))
    monkeypatch.setattr(lightning.Trainer, "precision", precision)
    torch.backends.cuda.matmul.fp32_precision = products
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr("foundry_lightning.facts._unreached", lambda _: 0)
    warnings = warnings_of(
        {
            "data": {},
            "model": model_facts(trainer.module),
            "plan": {"batches_per_epoch": 9, "batches_per_update": 1},
            "memory": {"memory_free": None, "memory_to_come": 0},
        }
    )
    assert ["tensor cores idle; set torch_dtype='bfloat16'" in warning for warning in warnings] == [True] * told


# ------------------------------------------------------------------ flash attention


@pytest.fixture
def half_only(kernel):  # noqa: F811
    """The real kernel refuses float32."""
    plain = kernel.plain

    def refuses(q, *args, **kwargs):
        if q.dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        return plain(q, *args, **kwargs)

    kernel.plain = refuses
    return kernel


@pytest.mark.usefixtures("half_only")
def test_a_run_with_flash_attention_shows_guesses_and_compares_with_the_teacher(tokenizer, tmp_path, monkeypatch):
    from transformers import modeling_flash_attention_utils as flash

    shown = []
    monkeypatch.setattr("rich.print", shown.append)
    functions, process = flash.lazy_import_flash_attention()
    kernel_ = functions[1].__self__
    functions = (kernel_.plain, kernel_.varlen, None, flash._pad_input, flash._unpad_input)  # of rows with padding
    monkeypatch.setattr(flash, "lazy_import_flash_attention", lambda *_, **__: (functions, process))
    module = DistilMLMLitModule(
        flash_bert(), tiny_bert(len(tokenizer), seed=1), config=DistilMLMConfig(), tokenizer=tokenizer
    )
    pipes = {name: rows(tokenizer, pack=True, max_length=64) for name in ("train", "val")}
    trainer = lightning.Trainer(
        accelerator="cpu",
        precision="bf16-mixed",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        callbacks=[Samples(2, folder=str(tmp_path)), CompareWithTeacher()],
    )
    trainer.fit(module, datamodule=MLMDataModule(**pipes))
    assert kernel_.calls
    assert (tmp_path / "samples.jsonl").exists()
    assert [column.header for column in shown[-1].columns] == ["", "parameters", "validation loss", "forward pass"]


def test_checks_on_the_cpu_replace_flash_attention(tokenizer):
    """The kernel runs on a GPU alone, and the model is not there yet."""
    module = MLMLitModule(flash_bert(), config=MLMConfig(), tokenizer=tokenizer)
    module.prepare()
    module.trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    assert module.parameters_without_gradient() == {}
    body = flash_bert().bert
    EncoderDistillTrainer(body, tiny_bert(seed=1).bert, EncoderDistillConfig(device="cpu"))
    assert uses_flash_attention(module.student)
    assert uses_flash_attention(body)


def test_flash_attention_in_float32_is_refused_with_the_precision_to_set(tokenizer, half_only):
    half_only.varlen = half_only.plain
    trainer = MLMTrainer(flash_bert(), tokenizer, MLMConfig(**QUIET))
    with pytest.raises(ValueError, match="flash attention needs half precision: torch_dtype='bfloat16'"):
        trainer.train(rows(tokenizer, pack=True), total_steps=1)


# ------------------------------------------------------------------ several ranks


@pytest.mark.ddp
def test_student_and_teacher_are_compared_on_all_ranks(tokenizer, tmp_path, monkeypatch):
    def run(num_ranks: int):
        def on_rank(rank: int) -> list[tuple]:
            from foundry_lightning.callbacks import console

            found, compare = [], console.compare
            monkeypatch.setattr(console, "compare", lambda *args: found.append(compare(*args)) or found[-1])
            student, teacher = tiny_bert(len(tokenizer)), tiny_bert(len(tokenizer), seed=1)
            settings = {**QUIET, "devices": num_ranks, "strategy": "ddp" if num_ranks > 1 else "auto"}
            config = DistilMLMConfig(
                **settings,
                grad_accumulation_steps=2 // num_ranks,
                trainer_kwargs={"callbacks": [console.CompareWithTeacher()]},
            )
            trainer = DistilMLMTrainer(student, teacher, tokenizer, config)
            trainer.train(rows(tokenizer), rows(tokenizer), total_steps=2)
            return [row[:3] for row in found[0]]

        return on_rank

    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    (alone,) = in_ranks(run(1), 1, folders[0])
    together = in_ranks(run(2), 2, folders[1])
    assert together[0] == together[1]
    for one, both in zip(alone, together[0], strict=True):
        assert one[:2] == both[:2]
        assert both[2] == pytest.approx(one[2], rel=1e-5)
