"""`python -m tokenspeed` is the command `tokenspeed`."""

from tokenspeed.cli import main

raise SystemExit(main())
