"""Programs that tests fork are what `python` would have made of them."""

import forked


def test_a_forked_program_can_use_several_threads(fork_server, tmp_path):
    """If the fork server had a pool of threads, it would wait for threads that only the server has."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\ntorch.set_num_threads(2)\nprint(torch.ones(500, 500).mm(torch.ones(500, 500))[0, 0].item())\n"
    )
    assert forked.run([script]).stdout == "500.0\n"
