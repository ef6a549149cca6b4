#include <immintrin.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
struct Config { unsigned char palette, start_row, reserved[14]; unsigned short n_bytes[16]; unsigned char n_rows[16]; };
__attribute__((noinline)) static void configure(int n_rows) {
    Config config{};
    config.palette = 1;
    for (int at = 0; at < 8; ++at) { config.n_bytes[at] = 64; config.n_rows[at] = (unsigned char) n_rows; }
    _tile_loadconfig(&config);
}
int main() {
    const int permission = 0x1023, tile_data = 18;
    if (syscall(SYS_arch_prctl, permission, tile_data)) { return 2; }
    configure(16);
    Config read{};
    _tile_storeconfig(&read);
    for (int at = 0; at < 8; ++at) { if (read.n_rows[at] != 16 || read.n_bytes[at] != 64) { return 1; } }
    return read.palette != 1;
}
