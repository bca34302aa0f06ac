"""Our own CPU kernels: C++ sources, how they are built, loaded and chosen. plain.py is the path beside them."""
