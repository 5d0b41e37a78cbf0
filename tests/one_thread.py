"""What the fork server loads first: an operation in several threads leaves a pool, without which forked programs hang.

Whether a small matrix product takes more threads depends on the processor.
"""

import torch

threads = torch.get_num_threads()
torch.set_num_threads(1)
