"""Entry point: ``torchrun ... -m torchtitan.freezing --job.config_file train_configs/x.toml``."""

import os
import sys

from torchtitan.freezing.launch import launch

if __name__ == "__main__":
    sys.argv[0] = "timelyfreeze train"  # which the parser of the command line names
    sys.exit(launch(sys.argv[1:], local_rank=int(os.environ.get("LOCAL_RANK", "0"))))
