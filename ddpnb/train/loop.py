"""The training loop: batches come out of it, losses go into it, and everything between the two is done right.

Runs in: worker (and wherever else the function is called)
"""

from __future__ import annotations

import itertools
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..context import current_session, device, log, progress, should_stop, stopwatch
from . import checks as mistakes
from . import objects
from .epoch import Epoch, batch_size, num_batches_of_all, place_of, set_epoch
from .evaluation import Values, evaluate
from .keeping import Keeper, Position, Training, habit
from .membership import join
from .precision import computes_in
from .resuming import say
from .saving import Mode
from .shards import ShardSteps
from .steering import Steering
from .steps import Gradients, Steps, Votes
from .turns import Turns, check_loss

_PACE = 0.5
"""Seconds between two reports of samples per second."""


class Loop:
    """Epochs of batches, on this rank's device; `update` turns each loss into its share of an optimizer step.

        loop = ddpnb.Loop(model, optimizer, loader, epochs=5, accumulate=4, clip_norm=1.0)
        for inputs, targets in loop:
            loop.update(F.cross_entropy(model(inputs), targets))
            if loop.epoch_done:
                ddpnb.log(accuracy=loop.evaluate(lambda x, y: (model(x).argmax(1) == y).float(), test_loader))

    stands for

        for epoch in range(5):
            loader.sampler.set_epoch(epoch)
            for window in windows_of(loader, 4):
                for inputs, targets in window:                          # all but the last under model.no_sync()
                    loss = F.cross_entropy(model(inputs), targets)
                    (loss * len(inputs) * world_size / samples_of_the_window_on_all_ranks).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    N ranks with batches of B take the steps that one process takes with batches of N·B, whatever the sizes of the last
    batches are. Ranks that have fewer batches than others get some without samples in the end.

    Args:
        model: made by `wrap`; it may be compiled.
        optimizer: over this model's parameters.
        loader: `ddpnb.loader`, or any other iterable of batches of tensors. A sampler's `set_epoch` is called.
        epochs: how often to go through it.
        accumulate: micro-batches of each rank in one optimizer step; the last window of an epoch has what is left.
        scheduler: of the learning rate; stepped once per optimizer step.
        clip_norm: most that the norm of all gradients together may be. None: no limit; the norm is logged all the same.
        checkpoint_every: where the run has a folder (`launch(…, run_dir=…)`): so many optimizer steps, "epoch", or a
            time such as "10min". There is one at a stop and after the last epoch in any case (none at a break), always
            between two steps, once the body of the loop is through. Its writing goes on beside the training.
        keep: how many of the newest checkpoints stay.
        best: name of a value that is logged, at the end of an epoch say; of the checkpoints made right after that, the
            one with the best stays as well.
        mode: "min": less is better; "max".
        state: objects of your own with `state_dict()` and `load_state_dict()`, such as an average of the weights; those
            of rank 0 are saved, and all ranks load them.
        exact: make the same steps, to the last bit, for any number of ranks. Each global batch, of world_size *
            batch_size * accumulate samples, is cut into `shards` (see below).
        shards: how many, at least as many as there are ranks; the same number for all runs that are to be compared.
        checks: warn of the classic mistakes: the same data on every rank, weights that differ, BatchNorm on few
            samples. They cost a moment at the beginning.

    **Exact** (`exact=True`), a Loop ends with the same bits on 1, 2, 3 … ranks, also when it is resumed on another
    number of them, as long as world_size * batch_size * accumulate is the same:

        loader = ddpnb.loader(train_set, 96 // ddpnb.world_size(), shuffle=True)
        loop = ddpnb.Loop(model, optimizer, loader, epochs=5, exact=True)

    A global batch is dealt out in shards; the loop hands them out one by one, each rank its own, and makes the step
    after the last. A shard is computed as if it were alone: BatchNorm normalises it by itself, and the generators of
    torch, NumPy and Python are set anew for it from the loader's seed and its place; running statistics move on in the
    order of the shards, gradients are added along one fixed tree. The body runs once for each shard, on some ranks more
    often than on others: what all ranks have to do together, `evaluate` say, has its place behind `loop.epoch_done`.
    Where an epoch's last global batch has less than two samples for each shard, some have one, and a BatchNorm over
    vectors refuses those: drop_last=True leaves that batch out.

    It costs batches of 1/shards of the global one, which a rank with many cores computes less well, since it has one
    thread; the memory of some log2(shards) times the gradients; and no overlap of backward and communication. Needed
    are `ddpnb.loader` over a dataset with indices, and "ddp" without static_graph, comm_hook, sync_batchnorm and
    torch.compile. Machines of another kind, or other versions, have other last bits. It was not tried on GPUs, where
    `torch.use_deterministic_algorithms(True)` is needed besides.

    **Steered**, `run.pause()` holds all ranks after the same step, and `run.set(lr=0.01)` changes the optimizer's lr,
    momentum or weight_decay for the next one. Of several groups the first gets the value, and the others are scaled by
    the same factor, as are all rates that the scheduler goes by. Checkpoints have it.

    **Resumed** (`launch(…, resume=True)`), the Loop begins where the last checkpoint was made: weights, optimizer and
    its settings, position, random numbers. On as many ranks, with the same versions and threads, it ends with the same
    bits as if it had never been interrupted, but for comm_hook="powersgd", whose memory is not saved, and
    static_graph=True on three or more ranks. On another number of ranks with `ddpnb.loader`, each sample is still seen
    once per epoch. A plain DataLoader is gone through again up to there: its bits are the same too, unless its workers
    are persistent, or it is over an IterableDataset that draws random numbers.

    Raises:
        TypeError, ValueError: an argument that cannot be.
        CheckpointError: the checkpoint is damaged, or of another training; and, from `update` or the loop's end, one
            could not be written. On all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loader: Iterable[Any],
        *,
        epochs: int,
        accumulate: int = 1,
        scheduler: Any = None,
        clip_norm: float | None = None,
        checkpoint_every: int | str = "epoch",
        keep: int = 3,
        best: str | None = None,
        mode: Mode = "min",
        state: Sequence[Any] = (),
        exact: bool = False,
        shards: int = 12,
        checks: bool = True,
    ) -> None:
        _check(model, optimizer, epochs, accumulate, clip_norm)
        _check_kinds(optimizer, scheduler, loader, epochs)
        when = habit(checkpoint_every, keep, best, mode)
        own = objects.checked(state)
        self.epoch = 0
        """The epoch that goes on, 0 … epochs - 1."""
        self.step = 0
        """Optimizer steps made."""
        self.samples = 0
        """Samples seen, on all ranks together."""
        self.skipped = 0
        """Steps not made because a gradient was nan or infinite, on whichever rank."""
        self.epoch_done = False
        """The batch at hand was the epoch's last, and its step is made."""
        self._world, session = join(), current_session()
        self._model, self._optimizer, self._loader, self._scheduler = model, optimizer, loader, scheduler
        self._epochs, self._accumulate, self._clip_norm, self._checks = epochs, accumulate, clip_norm, checks
        self._steps = (
            ShardSteps(model, loader, accumulate, shards)
            if exact
            else Steps(model, accumulate, batch_size(loader) or 1)
        )
        self._scaler = torch.amp.GradScaler(device().type) if computes_in(model) is torch.float16 else None
        self._turns: weakref.ref[_Turns] | None = None
        self._is_stepping = False
        self._wants_stop = self._has_stopped = False
        self._has_peers = session is not None and session.place.nnodes > 1  # other nodes, whose kernels may ask to stop
        self._meter = _Meter()
        self._keeper = Keeper(
            Training(
                model=model,
                optimizer=optimizer,
                loader=loader,
                objects=objects.named(scheduler, self._scaler, own),
                shards=shards if exact else None,
            ),
            when,
        )
        self._steering = Steering(optimizer, scheduler)
        self._resumed = self._keeper.load()
        if self._resumed is not None:
            self.epoch, self.step = self._resumed.epoch, self._resumed.step
            self.samples, self.skipped = self._resumed.samples, self._resumed.skipped

    def __iter__(self) -> Iterator[Any]:
        """Begin; once. The loop is over with its last batch, a break or an exception, and leaves nothing switched."""
        if self._turns is not None:
            raise RuntimeError("this Loop has been used: make a new one for another round of epochs")
        turns = _Turns(self)
        self._turns = weakref.ref(turns)
        self._steps.follow(turns)
        guard = self._optimizer.register_step_pre_hook(self._refuse_own_step)
        weakref.finalize(turns, guard.remove)
        self._keeper.begin(turns)
        self._steering.begin(turns, lambda: self.step)
        return turns

    def update(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        """Backward; in a window's last micro-batch the step as well: reduce, clip, step, schedule, log.

        Args:
            loss: a scalar, the mean over what the batch is made of.
            weight: of how much, where that is not its samples: tokens that count, the sum of sample weights. On each
                rank its own; the step is that of the mean over all of them.

        Raises:
            RuntimeError: there is no batch that waits for it.
            TypeError, ValueError: the loss is no scalar or has no gradient, or the weight is negative.
        """
        turns = self._answered("update(loss)")
        check_loss(loss)
        weight = turns.weigh(weight)
        scaled = self._scaler.scale(loss) if self._scaler is not None else loss
        self._meter.add(loss.detach(), weight)
        self._steps.backward(scaled, weight, turns.num_samples or 0, self._votes(turns))
        turns.answer()

    def skip(self) -> None:
        """Let the batch go without a trace; as `update` with weight 0, whether the model was called or not.

        Raises:
            RuntimeError: there is no batch, or the model's own collectives need every rank in it.
        """
        turns = self._answered("skip()")
        self._steps.pass_over(0, self._votes(turns))
        turns.answer()

    def stop(self) -> None:
        """End the loop, on all ranks after the same step: the next one whose last micro-batch is still to come."""
        self._wants_stop = True

    def evaluate(self, fn: Callable[..., Values], loader: Iterable[Any]) -> float | dict[str, float]:
        """The mean of `fn`'s values over all samples of `loader` on all ranks; call it on all ranks.

            accuracy = loop.evaluate(lambda x, y: (model(x).argmax(1) == y).float(), test_loader)

        stands for `model.eval()`, `torch.no_grad()`, and an all-reduce of a sum and a count. Sums are made without
        rounding: for the same values the result has the same bits on any number of ranks.

        Args:
            fn: called with each batch's parts, on this rank's device; gives one value per sample, a tensor of shape
                (batch,), or a dict of them.
            loader: each sample once over all ranks, as `ddpnb.loader(test_set, batch_size)` has it.

        Raises:
            TypeError, ValueError: `fn` gives something else, or there is no sample.
        """
        if self._checks:
            mistakes.check_evaluation_loader(loader)
        return evaluate(self._model, fn, loader)

    # ---- the step

    def _votes(self, turns: _Turns) -> Votes:
        """What this rank says with the batch at hand, where it is its window's last.

        The ranks of a node learn of a stop together; other nodes have to be told.
        """
        if not turns.is_last:
            return turns.votes()
        if self._has_peers:
            self._wants_stop = should_stop() or self._wants_stop
        return turns.votes(stop=self._wants_stop, **self._keeper.said())

    def _make_step(self) -> Gradients:
        """After a window's last backward."""
        gradients = self._steps.gradients()
        norm = gradients.norm / self._scaler.get_scale() if self._scaler is not None else gradients.norm
        is_finite = math.isfinite(norm)
        if gradients.scale > 0:
            factor = gradients.scale
            if self._clip_norm is not None and is_finite:
                factor *= min(1.0, self._clip_norm / (norm + 1e-6))
            self._step_optimizer(factor, is_finite)
            self._count(norm, is_finite)
        self._steps.clear()
        if not self._steps.is_timed:
            stopwatch().end_step()
        self.samples += gradients.num_samples
        return gradients

    def _step_optimizer(self, factor: float, is_finite: bool) -> None:
        self._keeper.wait()
        self._is_stepping = True
        try:
            if self._scaler is not None:
                if not is_finite:
                    self._steps.spoil()
                self._scaler.unscale_(self._optimizer)
                self._steps.scale(factor)
                self._scaler.step(self._optimizer)
                self._scaler.update()
            elif is_finite:
                self._steps.scale(factor)
                self._optimizer.step()
        finally:
            self._is_stepping = False

    def _count(self, norm: float, is_finite: bool) -> None:
        # What is not finite is shown too, unless it only makes the scaler lower its scale.
        shown = norm if is_finite or self._scaler is None else None
        self._meter.report(self.step, self.samples, shown, self._optimizer.param_groups[0]["lr"])
        if is_finite:
            if self._scheduler is not None:
                self._scheduler.step()
            self.step += 1
            return
        self.skipped += 1
        if self._scaler is None and self.skipped == 1:
            mistakes.warn(
                f"the gradients of the step after step {self.step} are not finite (norm {norm}): it is left out on all "
                "ranks, and counted in loop.skipped. A loss that is nan on one rank is enough: see each rank's curve."
            )

    def _refuse_own_step(self, *_: object) -> None:
        if not self._is_stepping:
            raise RuntimeError(
                "optimizer.step() within a Loop: loop.update(loss) does backward and step; leave out loss.backward(), "
                "optimizer.step() and optimizer.zero_grad()"
            )

    def _answered(self, how: str) -> _Turns:
        turns = self._turns() if self._turns is not None else None
        if turns is None or not turns.is_waiting:
            raise RuntimeError(f"loop.{how} once for each batch, within `for … in loop`: no batch waits for it")
        return turns


class _Turns(Turns):
    """The iterator of a loop."""

    def __init__(self, loop: Loop) -> None:
        super().__init__("loop.update(loss), or loop.skip(),")
        self._loop = loop
        self._has_begun = False
        self._num_batches = num_batches_of_all(loop._loader, loop._steps.joins_ranks)
        self._epochs = iter(progress(range(loop._epochs), "epoch"))
        self._windows: Iterator[int] = iter(())
        self._num_windows_done = 0
        self._resumed, loop._resumed = loop._resumed, None
        self._num_epochs_done = loop.epoch
        for _ in range(loop.epoch):
            next(self._epochs, None)
        if loop._checks:
            mistakes.check_loader(loop._loader, loop._steps.joins_ranks)
            mistakes.check_weights(loop._model)

    def __iter__(self) -> _Turns:
        return self

    def __next__(self) -> Any:
        loop = self._loop
        self.refuse_if_waiting()
        is_over = loop._has_stopped or self._num_epochs_done >= loop._epochs
        if self._num_epochs_done >= loop._epochs:
            next(self._epochs, None)  # before the last checkpoint is waited for: nobody takes that for a hang
        elif is_over:
            self._epochs = self._windows = iter(())  # let go of: an epoch that was cut short is not counted
        if self._has_begun and self.is_last:
            self._keep(is_over)
        loop.epoch_done = False
        if is_over:
            if self._resumed is not None:
                loop._keeper.put_back_before(self._resumed)
                say(
                    f"step {loop.step:,} was the last: nothing was left to train; raise epochs, or start without resume"
                )
            raise StopIteration
        batch = self.hand_out(self.epoch or self._begin_epoch())
        self._has_begun = True
        if loop._checks and self._is_first and not isinstance(loop._steps, ShardSteps):
            mistakes.check_batchnorm(loop._model, self.num_samples)
        return batch

    def answer(self) -> None:
        """The batch at hand has its backward: make the step if it was the window's last."""
        self.is_waiting = False
        if not self.is_last:
            return
        loop = self._loop
        gradients = loop._make_step()
        next(self._windows, None)
        self._num_windows_done += 1
        if not gradients.has_more:
            self.epoch = None
            self._num_epochs_done += 1
            loop.epoch_done = True
        loop._has_stopped = gradients.wants_stop or (not loop._has_peers and should_stop())
        loop._keeper.heard(gradients)

    def _keep(self, is_over: bool) -> None:
        """Between two steps, when the body is through with the batch: a checkpoint, if it is time."""
        loop, epoch = self._loop, self.epoch
        position = Position(
            epoch=loop.epoch if epoch is not None else self._num_epochs_done,
            step=loop.step,
            samples=loop.samples,
            skipped=loop.skipped,
            batches=0 if epoch is None else epoch.num_taken,
            windows=0 if epoch is None else self._num_windows_done,
        )
        place = place_of(loop._loader) if epoch is None else epoch.place
        loop._keeper.keep(position, place, epoch_done=loop.epoch_done, is_over=is_over)

    @property
    def _is_first(self) -> bool:
        return not self._num_epochs_done and self.epoch is not None and self.epoch.is_first

    def _begin_epoch(self) -> Epoch:
        loop = self._loop
        loop.epoch = next(self._epochs)
        loop._steps.look_again()
        set_epoch(loop._loader, loop.epoch)
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            loop._keeper.begin_epoch()
        else:
            loop._keeper.put_back_before(resumed)
        num_taken = 0 if resumed is None else resumed.batches
        if isinstance(loop._steps, ShardSteps):
            epoch: Epoch = loop._steps.epoch(num_taken)
        else:
            epoch = Epoch(loop._loader, loop._accumulate, self._num_batches, loop._steps.joins_ranks, num_taken)
        if resumed is not None:
            loop._keeper.put_back_after(resumed)
        self._num_windows_done = 0 if resumed is None else resumed.windows
        left = epoch.num_left
        num_windows = None if left is None else self._num_windows_done + -(-left // loop._accumulate)
        windows = itertools.count() if num_windows is None else range(num_windows)
        self._windows = iter(progress(windows, "step", total=num_windows))
        for _ in range(self._num_windows_done + 1):
            next(self._windows, None)
        return epoch


class _Meter:
    """The window's mean loss on this rank, and the pace."""

    def __init__(self) -> None:
        self._sum: torch.Tensor | float = 0.0
        self._weight = 0.0
        self._lr: float | None = None
        self._since: tuple[float, int] | None = None

    def add(self, loss: torch.Tensor, weight: float) -> None:
        """A micro-batch's loss; one without samples says nothing."""
        if weight:
            value = loss.item() if loss.is_cpu else loss
            self._sum = value * weight + self._sum
            self._weight += weight

    def report(self, step: int, samples: int, norm: float | None, lr: float) -> None:
        """Log the step, and begin anew."""
        values: dict[str, Any] = {}
        if self._weight:
            values["loss"] = self._sum / self._weight
        if norm is not None:
            values["grad_norm"] = norm
        if lr != self._lr:
            values["lr"] = self._lr = float(lr)
        session = current_session()
        now = time.monotonic() - (0.0 if session is None else session.paused_for)
        if self._since is None:
            self._since = now, samples
        elif now - self._since[0] > _PACE:
            values["samples/s"] = (samples - self._since[1]) / (now - self._since[0])
            self._since = now, samples
        if values and session is not None:
            log(values, step=step)
        self._sum, self._weight = 0.0, 0.0


def _check_kinds(optimizer: Optimizer, scheduler: object, loader: object, epochs: int) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("LBFGS calls the model several times a step, which a Loop cannot: write the loop yourself")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise TypeError(
            "ReduceLROnPlateau wants a metric: call scheduler.step(metric) yourself, after loop.evaluate(), and leave "
            "scheduler= out"
        )
    if isinstance(loader, Iterator) and epochs > 1:
        raise TypeError(f"epochs={epochs} of a {type(loader).__name__}, which can be gone through once: give a loader")


def _check(model: object, optimizer: object, epochs: object, accumulate: object, clip_norm: float | None) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"Loop's model is a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"Loop's optimizer is a torch.optim.Optimizer, not {type(optimizer).__name__}")
    for name, value in (("epochs", epochs), ("accumulate", accumulate)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} is a whole number, not {value!r}")
        if value < 1:
            raise ValueError(f"{name}={value}: at least 1")
    if clip_norm is not None and not 0 < clip_norm < math.inf:
        raise ValueError(f"clip_norm={clip_norm}: a positive number, or None for no limit")
    own = {id(parameter) for parameter in model.parameters()}
    if not own:
        raise ValueError("the model has no parameters: there is nothing to train")
    strange = [each for group in optimizer.param_groups for each in group["params"] if id(each) not in own]
    if strange:
        raise ValueError(
            f"the optimizer has a parameter of shape {tuple(strange[0].shape)} that is not the model's: make the "
            "optimizer after wrap(), over the wrapped model's parameters"
        )
