"""The printer: tile IR to CuTe C++."""
