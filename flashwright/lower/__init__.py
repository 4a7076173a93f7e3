"""The translator: a checked program to tile IR, through passes, to CuTe C++ and a launch plan."""
