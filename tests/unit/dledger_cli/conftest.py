"""Commands and consoles close the clients that they make."""

from tests.support.left_running import no_thread_is_left as no_thread_is_left
from tests.support.left_running import who_starts_threads as who_starts_threads
