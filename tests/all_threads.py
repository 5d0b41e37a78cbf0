"""The end of `one_thread`: forked programs use as many threads as others."""

import torch

from one_thread import threads

torch.set_num_threads(threads)
