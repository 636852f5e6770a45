/* A set-user-ID program that sees whether somebody else writes into it, for tests/attacks/injection.py.

   It ends with 7 if a byte of its memory or its registers were changed, 0 if none was until SIGTERM came or some seconds
   were over, and 3 if it does not run as root. */
#include <signal.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096
#define LOOKS 2000

static uint64_t region[SIZE / 8] __attribute__((section(".region,\"aw\",@nobits#"))); /* linked at REGION */
static volatile sig_atomic_t is_over;

/* Where the fake waits in its own code: nothing here comes to this address by itself. */
__asm__(".section .loop,\"ax\",@progbits\n .fill 512,1,0x90\n mov $231, %eax\n mov $7, %edi\n syscall\n .text\n");

static void end(int number)
{
	(void)number;
	is_over = 1;
}

/* Whatever is written of a mailbox has bytes at the beginning of a page. */
static int is_written(void)
{
	for (unsigned long page = 0; page < SIZE / PAGE; page++)
		for (int word = 0; word < 16; word++)
			if (((volatile uint64_t *)region)[page * PAGE / 8 + word])
				return 1;
	return 0;
}

int main(void)
{
	struct timespec pause = {0, 2000000};
	signal(SIGTERM, end);
	if (geteuid() != 0)
		_exit(3);
	for (int i = 0; i < LOOKS && !is_written() && !is_over; i++)
		nanosleep(&pause, 0);
	_exit(is_written() ? 7 : 0);
}
