"""The lab: examines runs, single steps, data and machines, and names what goes wrong in a precision and what helps."""

from mptrain.system.errors import OBSERVERS

OBSERVERS.add(__name__)  # an exception from here is not that of a user's code which is looked at
