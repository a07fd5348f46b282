"""`python -m foundry_lightning` is the command line."""

import sys

from foundry_lightning.commands import main

sys.exit(main())
