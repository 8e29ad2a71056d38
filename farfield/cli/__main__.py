"""`python -m farfield.cli`."""

from farfield.cli import main

if __name__ == "__main__":
    main()
