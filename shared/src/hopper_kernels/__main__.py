"""`python -m hopper_kernels`: the command line, where its script is not on the path."""

import sys

from hopper_kernels.cli import main

sys.exit(main())
