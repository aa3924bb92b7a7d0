"""Makes the scripts of `benches` importable, after everything else."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benches"))
