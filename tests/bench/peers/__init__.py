"""The same echo on other libraries, each by its own usual way. They run in a virtual environment of their own."""
