"""Nothing is shared but the path: tests import their oracles by name."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent / "support"))
torch.set_num_threads(1)
