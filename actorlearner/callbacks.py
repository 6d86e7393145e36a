"""What people hang on the Trainer's loop: `Callback`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from actorlearner.trainer import Trainer


class Callback:
    """Is told what the Trainer has done; derive from it and override what is of interest.

    Everything runs in the learner's process, between two steps of the loop, which waits for it.
    ``trainer.env_steps``, ``trainer.updates``, ``trainer.settings`` and ``trainer.model`` are there
    to be read. An exception ends the run: everything is saved and closed, then it is raised again.

    Example::

        class StopWhenSolved(Callback):
            def after_evaluation(self, trainer, metrics):
                if metrics["evaluation/return_mean"] >= 475:
                    trainer.stop()


        Trainer(callbacks=[StopWhenSolved()]).fit("CartPole-v1")
    """

    def after_update(self, trainer: Trainer, metrics: Mapping[str, Tensor | float]) -> None:
        """An update was made.

        Args:
            trainer: whose ``updates`` counts it.
            metrics: ``step/name`` of each training step. Tensors lie on the learner's device
                without axes; to read one (``float``) waits for the device.
        """

    def after_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """An evaluation has ended, maybe one of an earlier snapshot.

        Args:
            trainer: who asked for it.
            metrics: ``evaluation/name``.
        """

    def at_save(self, trainer: Trainer, directory: Path) -> None:
        """A checkpoint was written, of a moment that may lie some updates back.

        Args:
            trainer: who wrote it.
            directory: the checkpoint, complete; ``trainer.settings.keep_last`` newer ones later it
                is deleted.
        """
