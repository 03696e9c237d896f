"""Stored datasets name this module as their time server's command; the program is `synthesis.servers.pinned_clock`."""

from synthesis.servers.pinned_clock import main

if __name__ == "__main__":
    main()
