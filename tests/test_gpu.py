"""What only a CUDA device can show. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Kernel

pytestmark = pytest.mark.gpu


def test_a_worker_computes_on_its_gpu_and_its_result_comes_back_on_the_cpu(kernel: Kernel) -> None:
    reply = kernel.run("""
        def train():
            x = torch.ones(4, device=ddpnb.device())
            torch.distributed.all_reduce(x)
            ddpnb.log(loss=x.sum())
            return x

        run = ddpnb.launch(train, nproc_per_node=1)
        print(run.result(), run.result().device, run.history["loss"])
    """)

    assert "tensor([1., 1., 1., 1.]) cpu [4.]" == reply.text


def test_log_never_waits_for_the_device(kernel: Kernel) -> None:
    reply = kernel.run("""
        def train():
            x = torch.randn(8192, 8192, device=ddpnb.device())
            torch.cuda.synchronize()
            for _ in range(20):
                x = x @ x / 8192
            still_busy = not torch.cuda.current_stream().query()
            ddpnb.log(loss=x.mean())
            return still_busy, not torch.cuda.current_stream().query()

        print(ddpnb.launch(train, nproc_per_node=1).result())
    """)

    assert "(True, True)" == reply.text


def test_a_kernel_that_has_used_cuda_launches_as_before(kernel: Kernel) -> None:
    reply = kernel.run("""
        kept = torch.ones(1, device="cuda")
        print(ddpnb.launch(lambda: (kept + 1).item(), nproc_per_node=1).result())
    """)

    assert "2.0" == reply.text


def test_a_run_resumed_on_a_gpu_ends_with_the_same_bits(kernel: Kernel, tmp_path: Path) -> None:
    reply = kernel.run(f"""
        from tests.resumable import train

        one = ddpnb.Launcher(nproc_per_node=1, view=False, env={{"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}})
        saved = ddpnb.Launcher(nproc_per_node=1, view=False, run_dir={str(tmp_path)!r}, env=one.env)
        again = ddpnb.Launcher(nproc_per_node=1, view=False, run_dir={str(tmp_path)!r}, resume=True, env=one.env)
        saved(train, "stop", 5, checkpoint_every=1).result()
        print(one(train).result()[1:] == again(train).result()[1:])
    """)

    assert "True" == reply.text
