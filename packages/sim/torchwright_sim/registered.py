"""Importing this module starts the devices, as importing another vendor's package does."""

import torchwright_sim
from torchwright_sim.registration import start

if torchwright_sim.fault() is None:
    start()
