"""What the whole package uses: errors, files, devices, processes, records. It knows no other package."""
