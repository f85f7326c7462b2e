"""The link on emulated lines: delay, loss, a rate, and the real TCP of the kernel."""
