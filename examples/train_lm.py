"""Trains a byte-level GPT on Python's standard library with our attention.  ``make demo`` runs it."""

from __future__ import annotations

import pathlib
import time
from typing import Annotated

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import orbax.checkpoint as ocp
import tqdm
import typer
from flax import nnx

import pallas_flash

from . import corpus
from .gpt import GPT, SIZES, Size, flash

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BITS = 1 / np.log(2)
COMPARED_STEPS = 20


class Trainer:
    """Model, optimizer and the two compiled functions."""

    def __init__(self, size: Size, implementation: str | None, steps: int):
        dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
        self.graph, self.params = nnx.split(GPT(size, dtype, flash(implementation), nnx.Rngs(0)))
        schedule = optax.warmup_cosine_decay_schedule(0.0, size.learning_rate, min(50, steps // 4), steps)
        self.optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))
        self.state = self.optimizer.init(self.params)
        self.step = jax.jit(self._step, donate_argnums=(0, 1))
        self.loss = jax.jit(self._loss)

    def _loss(self, params, batch):
        logits = nnx.merge(self.graph, params)(batch["tokens"], batch["segments"], batch["positions"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.sum(losses * batch["counted"]) / jnp.sum(batch["counted"])

    def _step(self, params, state, batch):
        loss, grads = jax.value_and_grad(self._loss)(params, batch)
        updates, state = self.optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def train(self, batches, steps: int, description: str, tokens_per_step: int) -> list[float]:
        """Runs ``steps`` steps behind a progress bar; returns the losses in nats."""
        losses: list[jax.Array] = []
        started = 0.0
        with tqdm.tqdm(total=steps, desc=description, mininterval=0.5) as bar:
            for i in range(steps):
                self.params, self.state, loss = self.step(self.params, self.state, next(batches).arrays())
                losses.append(loss)
                # One step behind: reading the newest loss would leave a GPU idle while the next batch is made.
                shown = float(losses[max(i - 1, 0)])
                if i == 0:  # the first step compiles
                    started = time.perf_counter()
                rate = tokens_per_step * max(i - 1, 0) / (time.perf_counter() - started)
                speed = f", {rate:,.0f} tokens/s" if rate else ""
                bar.set_postfix_str(f"loss {shown:.3f}, {shown * BITS:.2f} bits/byte{speed}", refresh=False)
                bar.update()
        return [float(loss) for loss in losses]

    def validate(self, split: corpus.Corpus, size: Size, batches: int = 8) -> float:
        """Mean loss in nats on held-out files."""
        source = split.batches(size.batch, size.length, seed=1)
        return float(np.mean([float(self.loss(self.params, next(source).arrays())) for _ in range(batches)]))


def peak_memory() -> str:
    """Peak bytes in use on the device, or of the process where the backend keeps no count."""
    stats = jax.devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return f"{stats['peak_bytes_in_use'] / 2**20:,.0f} MiB on the device"
    import resource

    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:,.0f} MiB of the process"


def draw(losses: list[float], validation: float, unigram: float, path: pathlib.Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(np.array(losses) * BITS, lw=0.8, label="training")
    axes.axhline(unigram, color="grey", ls=":", label=f"entropy of single bytes, {unigram:.2f}")
    axes.plot(len(losses) - 1, validation * BITS, "o", label=f"held-out files, {validation * BITS:.2f}")
    axes.set(xlabel="step", ylabel="bits per byte", title="byte-level GPT on Python's standard library")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(
    size: Annotated[str | None, typer.Option(help=f"{', '.join(SIZES)}; by default what suits the machine")] = None,
    steps: Annotated[int | None, typer.Option(help="training steps; by default what the size says", min=1)] = None,
    implementation: Annotated[str | None, typer.Option(help="triton, xla, ...; by default the library chooses")] = None,
    out: Annotated[pathlib.Path, typer.Option(help="folder for checkpoint and plot")] = pathlib.Path("runs/train_lm"),
) -> None:
    """Trains a byte-level GPT on the sources of Python's standard library."""
    on_gpu = jax.default_backend() == "gpu"
    name = size or ("gpu-small" if on_gpu else "cpu")
    if name not in SIZES:
        raise typer.BadParameter(f"--size must be one of {', '.join(SIZES)}; got {name!r}")
    shape = SIZES[name]
    steps = steps or shape.steps
    train, held_out = corpus.load()
    unigram = held_out.unigram_bits()
    print(f"{len(train.text):,} bytes in {len(train.starts) - 1} files for training, {len(held_out.text):,} held out")

    def spec(heads):
        dtype = jnp.bfloat16 if on_gpu else jnp.float32
        return jax.ShapeDtypeStruct((shape.batch, shape.length, heads, shape.head_dim), dtype)

    ids = jax.ShapeDtypeStruct((shape.batch, shape.length), jnp.int32)
    kv = spec(shape.kv_heads)
    options = {"is_causal": True, "q_segment_ids": ids, "implementation": implementation}
    try:
        plan = pallas_flash.explain(spec(shape.heads), kv, kv, **options)
    except (NotImplementedError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--implementation") from error
    print(f"attention:\n{plan}\n")

    tokens = shape.batch * shape.length
    trainer = Trainer(shape, implementation, steps)
    losses = trainer.train(train.batches(shape.batch, shape.length, seed=0), steps, "training", tokens)
    validation = trainer.validate(held_out, shape)
    print(f"peak memory: {peak_memory()}")

    compared = min(COMPARED_STEPS, steps)
    reference = Trainer(shape, "xla", steps)
    again = reference.train(train.batches(shape.batch, shape.length, seed=0), compared, "the same on xla", tokens)
    difference = max(abs(a - b) for a, b in zip(losses, again))
    print(f"largest difference of the first {compared} losses to implementation='xla': {difference:.1e}")
    if plan.forward == "xla":
        print("(the run above was on xla itself, so this only shows that a run repeats exactly)")

    out.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((out / "checkpoint").resolve(), nnx.to_pure_dict(trainer.params), force=True)
    draw(losses, validation, unigram, out / "loss.png")
    print(f"checkpoint and loss curve are in {out}/")
    print(
        f"held-out loss {validation:.3f} nats = {validation * BITS:.2f} bits per byte; single bytes have {unigram:.2f}"
    )


if __name__ == "__main__":
    typer.run(main)
