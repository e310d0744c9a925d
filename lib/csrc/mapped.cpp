// Maps a file and closes it: the mapping stays valid.
#include "mapped.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace tokamake {
namespace {

[[noreturn]] void fail(int code, int descriptor) {
  if (descriptor >= 0) close(descriptor);
  throw std::system_error(code, std::generic_category());
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) fail(errno, descriptor);
  struct stat status{};
  if (fstat(descriptor, &status) != 0) fail(errno, descriptor);
  if (!S_ISREG(status.st_mode)) fail(S_ISDIR(status.st_mode) ? EISDIR : EINVAL, descriptor);
  size_ = status.st_size;
  if (size_ > 0) {
    void* mapped = mmap(nullptr, size_, PROT_READ, MAP_SHARED, descriptor, 0);
    if (mapped == MAP_FAILED) fail(errno, descriptor);
    data_ = static_cast<const uint8_t*>(mapped);
  }
  close(descriptor);
}

MappedFile::~MappedFile() {
  if (data_) munmap(const_cast<uint8_t*>(data_), size_);
}

}  // namespace tokamake
