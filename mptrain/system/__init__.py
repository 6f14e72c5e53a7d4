"""Ground of the package: errors, files, devices, processes, records. It knows no other package."""
