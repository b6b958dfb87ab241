"""The start of every process of the server: torchvision's shapes of its compiled operations, of which there are none,
are an empty module."""

import sys
from types import ModuleType

NAME = "torchvision._meta_registrations"
sys.modules[NAME] = ModuleType(NAME)
