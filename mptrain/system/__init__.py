"""What every room uses: errors, files, devices, processes, records. It knows none of the rooms."""
